"""Evicts pods for pods that lack only GPU memory."""
