"""Evicts pods that do not fit on the GPU that they got."""
