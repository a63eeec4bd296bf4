"""Ends the start phase of pods that start alone."""
