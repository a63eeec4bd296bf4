"""Rules of kube-scheduler itself about nodes and pods, computed in the same way."""
