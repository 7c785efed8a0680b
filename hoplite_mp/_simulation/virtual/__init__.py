"""What real nodes, managers and clients run in: virtual hosts, processes, network and time."""
