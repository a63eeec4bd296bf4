"""The commands `headroom` and `kubectl headroom`."""
