"""Ends the starts of pods that start alone."""
