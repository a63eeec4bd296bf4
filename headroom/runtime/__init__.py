"""Code for I/O that all processes share: the API server, ports, settings, metrics and loops."""
