"""HTTP servers: ports, TLS, client certificates and limits on clients."""
