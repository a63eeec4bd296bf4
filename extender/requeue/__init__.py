"""Requeues rejected pods when they fit on a node."""
