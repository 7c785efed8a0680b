"""The vocabulary between node and manager: typed messages and the sans-io codec.

fields  <-  operations, groups  <-  messages  <-  codec

Before that, between hosts: versions, greetings  <-  handshake. One host needs none of them.
"""
