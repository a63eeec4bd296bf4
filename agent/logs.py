"""Configures the agent's log. Imports no other part of the agent."""

import sys

import structlog


def log_to_stderr() -> None:
    """Write the log to stderr, as one JSON object per line."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
