"""Decides when the start of a pod that starts alone has ended."""
