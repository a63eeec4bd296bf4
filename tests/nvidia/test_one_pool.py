"""Tests the ConfigMap of docs/how-to/one-pool.md with NVIDIA's real device plugin."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.driver import Gpu
from tests.nvidia.conftest import Kubelet
from tests.samples.test_one_pool import plugin

StartPlugin = Callable[..., Kubelet]
GPUS = [Gpu("GPU-0"), Gpu("GPU-1")]


def rejecting(config: dict[str, Any]) -> dict[str, Any]:
    slicing = config["sharing"]["timeSlicing"] | {"failRequestsGreaterThanOne": True}
    return config | {"sharing": {"timeSlicing": slicing}}


def test_the_plugin_allocates_replicas_of_two_gpus_to_one_container(
    start_plugin: StartPlugin,
) -> None:
    kubelet = start_plugin(GPUS, plugin())
    registered = kubelet.registered()
    assert len(kubelet.advertised(registered).replicas) == 2 * 8
    answer = kubelet.allocate(registered, "GPU-0::0", "GPU-1::0")
    assert set(answer.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == {"GPU-0", "GPU-1"}


def test_the_plugin_rejects_them_with_the_setting_that_articles_recommend(
    start_plugin: StartPlugin,
) -> None:
    kubelet = start_plugin(GPUS, rejecting(plugin()))
    with pytest.raises(grpc.RpcError, match="maximum request size"):
        kubelet.allocate(kubelet.registered(), "GPU-0::0", "GPU-1::0")
