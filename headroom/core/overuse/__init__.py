"""Decides which pods are evicted because they use more memory than they reserved."""
