"""Measures kube-scheduler's calls of the extender: see ``__main__``."""
