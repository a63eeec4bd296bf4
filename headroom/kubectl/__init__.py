"""`kubectl headroom`: what the debug API knows, for people at a terminal. It speaks HTTP alone."""
