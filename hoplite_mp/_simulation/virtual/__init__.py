"""The environment of real nodes, managers and clients: virtual hosts, processes, network, time."""
