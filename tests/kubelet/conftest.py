"""Fixtures that start real nodes for the tests of this folder."""

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

#: The kubelet of steered nodes. It is the newest version that supports steering, or the version
#: under test if that is older.
STEERED_KUBELET = "kubelet-1.36" if is_at_least("1.36") else "kubelet"


@pytest.fixture
def start_node(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[StartNode]:
    """Return a function that starts a node. Its arguments are the GPUs or their number, and the
    number of replicas per GPU.

    Each node has a unique name. ``numa`` has the NUMA node of each device.
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
            # Show the progress of the build, because the first build takes minutes.
            with capture.global_and_fixture_disabled():
                built(settings.get("kubelet", "kubelet"), "nvidia-device-plugin")
            name = f"kubelet-{os.urandom(4).hex()}"
            devices = gpus
            if isinstance(devices, int):
                places = zip(range(devices), numa or (None,) * devices, strict=True)
                devices = [Gpu(f"GPU-{index}", numa=each) for index, each in places]
            return stack.enter_context(node(plane, name, devices, replicas, **settings))

        yield start
