"""The vocabulary between node and manager: typed messages and the sans-io codec.

fields  <-  operations, groups  <-  messages  <-  codec
"""
