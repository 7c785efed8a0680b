"""Authenticated byte streams between hosts. A cluster on one host imports only stream and silence.

    addresses, tokens   stream  <-  memory, tls   sockets   certificates   silence   rendezvous
                          <-  conversation  <-  listener, caller

This package has no threads or event loops: the loop of the process that uses a stream drives it,
and passes the time in. Only `Dialer.wait` and the reading of a token file block.
"""
