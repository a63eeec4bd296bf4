"""Hides the installed package rich, because structlog would import it."""

raise ImportError("the image of the agent has no rich")
