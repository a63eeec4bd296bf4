"""Real nodes for comparison with the stand-in."""

from tests.kubelet.conftest import start_node

__all__ = ["start_node"]
