"""Trackers of single aspects of the cluster. The writer passes every change to all of them."""
