"""Decides which pods are evicted because they lack memory on the device that they got."""
