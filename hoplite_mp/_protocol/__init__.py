"""The messages between node and manager, and between nodes: their types, and the sans-io codec.

fields  <-  membership, copies, operations, groups  <-  messages  <-  codec
fields  <-  peers       objects and tasks between nodes
            local       between a client and its node

Between hosts the handshake comes first: versions, greetings  <-  handshake. A cluster of one host
needs none of these three.
"""
