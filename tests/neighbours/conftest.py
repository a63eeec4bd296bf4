"""Fixtures for tests with real components of other projects. Only ``make neighbours`` runs these
tests, because they are heavy.
"""

from tests.e2e.conftest import binaries, new_cluster, plane, tell

__all__ = ["binaries", "new_cluster", "plane", "tell"]
