"""Decides. The functions are pure. They use no I/O, no clock and no random numbers, and receive
times as arguments."""
