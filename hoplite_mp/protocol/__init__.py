"""The vocabulary between node and manager, and between nodes: typed messages, the sans-io codec.

fields  <-  stripes  <-  membership, copies, operations, groups  <-  messages  <-  codec
fields  <-  peers       objects and tasks between nodes
            local       between a client and its node

Before that, between hosts: versions, greetings  <-  handshake. One host needs none of them.
"""
