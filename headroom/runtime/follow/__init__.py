"""Everything that a process needs to follow the cluster: watches, the state's writer, and loops."""
