"""Decides which pods may be evicted, and which are: victims of preemption, and overuse."""
