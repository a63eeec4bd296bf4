"""Benchmarks and the demo. They are not part of the installed package."""
