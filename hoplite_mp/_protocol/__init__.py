"""Messages between processes: their types, and the sans-io codec.

fields  <-  membership, copies, operations, groups  <-  messages  <-  codec
fields  <-  peers       objects and tasks between nodes
            local       between a client and its node

Connections between hosts begin with a handshake: greetings  <-  handshake.
"""
