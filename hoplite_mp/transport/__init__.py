"""Authenticated byte streams between hosts. Nothing of this is imported on one host alone.

    addresses, tokens   stream  <-  memory, tls   listen   certificates
                          <-  conversation  <-  door, caller

There are no threads, event loops or clocks in here; the caller's loop drives everything.
"""
