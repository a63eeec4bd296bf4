"""Builds the GPUNode status from one sample, and writes it."""
