"""Checks that the real device plugin offers each GPU of the node with the configured number of
replicas.

The ID of a shared replica is ``<uuid>::<number>``. A replica has no memory of its own.
"""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.driver import GIB, Gpu, Instance
from tests.nvidia.conftest import Advertised, Kubelet, sharing

UUIDS = [f"GPU-{number:08x}-1111-2222-3333-444444444444" for number in range(3)]
GPUS = [
    Gpu(UUIDS[0]),
    Gpu(UUIDS[1]),
    Gpu(UUIDS[2], memory_bytes=24 * GIB, model="NVIDIA L4"),
]

StartPlugin = Callable[..., Kubelet]


def healthy(resource: str, replicas: list[str]) -> Advertised:
    socket = f"nvidia-{resource.partition('/')[2]}.sock"
    return Advertised(resource, socket, dict.fromkeys(replicas, "Healthy"))


def shared(replicas: int) -> list[str]:
    return [f"{uuid}::{number}" for uuid in UUIDS for number in range(replicas)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({}, healthy("nvidia.com/gpu", UUIDS), id="not shared: the UUIDs themselves"),
        pytest.param(
            sharing("timeSlicing", 4),
            healthy("nvidia.com/gpu", shared(4)),
            id="time-slicing under the same name as whole GPUs",
        ),
        pytest.param(
            sharing("timeSlicing", 4, renameByDefault=True),
            healthy("nvidia.com/gpu.shared", shared(4)),
            id="time-slicing, renamed",
        ),
    ],
)
def test_every_gpu_is_offered_whatever_its_model(
    start_plugin: StartPlugin, config: dict[str, Any], expected: Advertised
) -> None:
    assert start_plugin(GPUS, config).advertised() == expected


def test_a_custom_resource_name_or_choice_of_devices_is_ignored(start_plugin: StartPlugin) -> None:
    own = {"name": "nvidia.com/gpu", "replicas": 2, "rename": "nvidia.com/mine", "devices": [0]}
    config = {"sharing": {"timeSlicing": {"resources": [own]}}}
    kubelet = start_plugin(GPUS, config)
    assert kubelet.advertised() == healthy("nvidia.com/gpu", shared(2))
    log = kubelet.log("nvidia-device-plugin")
    for field in ("rename", "devices"):
        assert f"the '{field}' field in sharing.timeSlicing.resources is not yet supported" in log


MPS = sharing("mps", 4)


def test_replicas_by_mps_are_offered_like_others_and_get_the_path_to_the_mps_server(
    start_plugin: StartPlugin,
) -> None:
    kubelet = start_plugin(GPUS, MPS)
    registered = kubelet.registered()
    assert kubelet.advertised(registered) == healthy("nvidia.com/gpu", shared(4))
    answer = kubelet.allocate(registered, f"{UUIDS[0]}::1")
    assert answer.envs["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == UUIDS[0]


def test_mps_rejects_several_replicas_after_the_pod_was_bound(start_plugin: StartPlugin) -> None:
    kubelet = start_plugin(GPUS, MPS)
    with pytest.raises(grpc.RpcError, match="maximum request size for shared resources is 1"):
        kubelet.allocate(kubelet.registered(), f"{UUIDS[0]}::0", f"{UUIDS[1]}::0")


def test_mps_on_mig_devices_is_rejected_by_the_plugin(start_plugin: StartPlugin) -> None:
    cut = [Gpu(UUIDS[0], instances=(Instance("MIG-1", 1),))]
    with pytest.raises(RuntimeError, match="MPS is not supported for MIG devices"):
        start_plugin(cut, {"flags": {"migStrategy": "single"}} | MPS).advertised()
