"""The agent's log, in a module that imports no other part of it."""

import sys

import structlog


def log_to_stderr() -> None:
    """Configure logging: one JSON object per line on stderr."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
