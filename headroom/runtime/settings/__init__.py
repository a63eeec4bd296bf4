"""Settings: their fields, where they are read from, and how they are validated."""
