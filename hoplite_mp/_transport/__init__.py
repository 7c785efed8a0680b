"""Authenticated byte streams between hosts. A cluster on one host imports only `stream`.

    addresses, tokens   stream  <-  memory, tls   sockets   certificates   rendezvous
                          <-  conversation  <-  listener, caller

This package has no threads or event loops. The loop of the process that uses a stream calls its
methods, and passes the current time. Only `Dialer.wait` and the reading of a token file block.
"""
