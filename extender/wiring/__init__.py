"""Puts the parts together, for a fleet file or for a cluster; nothing else knows all of them."""
