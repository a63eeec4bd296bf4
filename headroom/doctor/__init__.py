"""`headroom doctor`: reads the cluster and reports what costs it safety or memory."""
