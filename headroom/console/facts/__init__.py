"""Facts that only views show, computed from the cluster without I/O."""
