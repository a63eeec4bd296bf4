"""Settings: their fields, their sources, and their validation."""
