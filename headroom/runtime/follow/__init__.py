"""Everything that a process needs to follow the cluster: watches, the writer of the state, and
loops."""
