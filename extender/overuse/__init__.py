"""Evicts pods that use more memory than they reserved."""
