"""Decides which pods may be evicted, and which are evicted because of preemption or overuse."""
