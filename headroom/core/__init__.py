"""Makes all decisions, in pure functions. They use no I/O, no clock and no random numbers, and
receive times as arguments."""
