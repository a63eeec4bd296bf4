"""Replays a cluster's history to plan how many GPUs its work needs, shared and unshared."""
