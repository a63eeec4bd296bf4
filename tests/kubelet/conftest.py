"""Real nodes for the tests of this folder."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from tests.controlplane import ControlPlane, built
from tests.driver import Gpu
from tests.kubelet.node import Node, node
from tests.kubernetes_version import is_at_least

StartNode = Callable[..., Node]

#: The kubelet of steered nodes: the newest that supports steering, or an older version under test.
STEERED_KUBELET = "kubelet-1.36" if is_at_least("1.36") else "kubelet"


@pytest.fixture
def start_node(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[StartNode]:
    """Start a node with this number of GPUs, or these GPUs, each with this number of replicas.

    Each node has its own name. ``numa`` is the NUMA node of each device.
    """
    if os.geteuid() != 0:
        pytest.skip("a kubelet needs root, in a mount namespace of its own")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with ExitStack() as stack:

        def start(
            gpus: int | list[Gpu],
            replicas: int,
            numa: Sequence[int | None] = (),
            **settings: Any,
        ) -> Node:
            # The first build takes minutes, so show its progress.
            with capture.global_and_fixture_disabled():
                built(settings.get("kubelet", "kubelet"), "nvidia-device-plugin")
            name = f"kubelet-{os.urandom(4).hex()}"
            devices = gpus
            if isinstance(devices, int):
                places = zip(range(devices), numa or (None,) * devices, strict=True)
                devices = [Gpu(f"GPU-{index}", numa=each) for index, each in places]
            return stack.enter_context(node(plane, name, devices, replicas, **settings))

        yield start
