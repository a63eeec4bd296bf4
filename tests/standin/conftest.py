"""Real nodes to hold the stand-in against."""

from tests.kubelet.conftest import start_node

__all__ = ["start_node"]
