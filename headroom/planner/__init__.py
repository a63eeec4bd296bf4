"""Replays a cluster's history to plan how many GPUs its pods need, shared and unshared."""
