"""Extender and console in one process: for one replica, or without a cluster."""
