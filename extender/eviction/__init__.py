"""Evicts pods that do not fit on the GPU that the device plugin gave them."""
