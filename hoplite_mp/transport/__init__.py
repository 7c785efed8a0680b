"""Bytes between hosts, and who may send them. On one host nothing of this is imported.

    addresses, tokens   stream  <-  memory, tls   listen   certificates
                          <-  conversation  <-  door, caller

No thread, no event loop of its own, no clock: whoever has a loop drives what is in here.
"""
