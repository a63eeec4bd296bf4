"""Checks with real components of other projects. They are heavy, so only ``make neighbours`` runs
them.
"""

from tests.e2e.conftest import binaries, new_cluster, plane, tell

__all__ = ["binaries", "new_cluster", "plane", "tell"]
