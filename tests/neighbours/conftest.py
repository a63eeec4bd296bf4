"""Checks beside real components of others. They are heavy: only ``make neighbours`` runs them."""

from tests.e2e.conftest import binaries, new_cluster, plane, tell

__all__ = ["binaries", "new_cluster", "plane", "tell"]
