"""I/O in: what the API server says about pods, nodes, namespaces, GPUNodes and heartbeats."""
