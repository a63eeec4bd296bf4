"""`headroom doctor`: reads the cluster and reports problems that endanger pods or waste memory."""
