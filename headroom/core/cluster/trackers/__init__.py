"""Trackers, which each follow one aspect of the cluster. The writer passes every change to all of
them."""
