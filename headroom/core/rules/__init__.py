"""Rules of kube-scheduler itself about nodes and pods, computed as it does."""
