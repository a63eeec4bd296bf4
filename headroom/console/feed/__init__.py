"""Recent changes and decisions, also of other extenders."""
