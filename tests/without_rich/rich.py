"""Hides the package rich, which structlog would import if it is installed."""

raise ImportError("the image of the agent has no rich")
