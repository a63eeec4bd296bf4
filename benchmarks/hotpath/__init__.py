"""Measures kube-scheduler's calls of the extender. See ``__main__``."""
