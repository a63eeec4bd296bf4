"""Scales simulated node groups with a real Cluster Autoscaler, and counts unused nodes."""
