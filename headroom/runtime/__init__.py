"""I/O that processes share: the API server, ports, settings, metrics and loops."""
