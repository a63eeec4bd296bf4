"""Decides which pods form a group, until when memory is held for them, and when they are
evicted."""
