"""Fixtures that start real nodes, which tests compare with the stand-in."""

from tests.kubelet.conftest import start_node

__all__ = ["start_node"]
