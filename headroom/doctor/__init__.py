"""`headroom doctor`: reads the cluster and reports what costs safety or memory."""
