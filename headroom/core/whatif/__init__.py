"""Answers what would happen on a changed copy of the cluster."""
