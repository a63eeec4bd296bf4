"""`kubectl headroom`: shows data of the debug API at a terminal. It only uses the HTTP API."""
