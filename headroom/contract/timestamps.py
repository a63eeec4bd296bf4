"""Timestamps of Kubernetes objects."""

from datetime import UTC, datetime


def age(stamp: str, wall_s: float) -> float | None:
    """Return the seconds from an RFC 3339 timestamp to ``wall_s``, or None if it cannot be
    parsed."""
    try:
        then = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return wall_s - then.timestamp()
