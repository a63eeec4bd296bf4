"""Decides. Pure: no I/O, no clock, no chance; times are arguments."""
