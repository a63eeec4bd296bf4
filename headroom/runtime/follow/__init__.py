"""A process that follows the cluster: watches, the writer of its state, and loops."""
