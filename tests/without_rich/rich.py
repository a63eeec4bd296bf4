"""Stands before the package rich, which structlog imports if it is installed."""

raise ImportError("the image of the agent has no rich")
