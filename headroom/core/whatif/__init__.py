"""Computes what would happen in a changed copy of the cluster."""
