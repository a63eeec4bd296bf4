"""Measurements, and the demo. Not part of the installed package."""
