"""Preempts pods for other pods that lack only GPU memory."""
