"""HTTP: the wire of kube-scheduler, its verbs, and the debug API."""
