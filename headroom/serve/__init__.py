"""Extender and console in one process, for a single replica or without a cluster."""
