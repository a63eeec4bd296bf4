"""Recent changes and decisions of this process and of other extenders."""
