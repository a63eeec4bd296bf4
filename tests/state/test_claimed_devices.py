"""Compares claims of DRA with measured use, to find bytes that no claim accounts for."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headroom.contract.dra import ResourceClaim
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.kube import ResourceSlice
from headroom.contract.watched import ClaimGone, ClaimSeen, Relisted, SliceGone, SliceSeen
from headroom.core.cluster.claimed_devices import ClaimedDevices, DraDevice

LINGERS_S = 15.0

GIB = 1 << 30
GPU_0, GPU_1 = DraDevice("n", "gpu-0"), DraDevice("n", "gpu-1")


def piece(
    node: str | None = "n",
    pool: str | None = None,
    driver: str = "gpu.nvidia.com",
    name: str = "s",
    devices: tuple[str, ...] = ("0", "1"),
    basic: bool = False,
) -> ResourceSlice:
    listed: list[dict[str, Any]] = []
    for each in devices:
        attributes = {"uuid": {"string": f"GPU-{each}"}, "index": {"int": 1}}
        fields: dict[str, Any] = {"attributes": attributes}
        listed.append({"name": f"gpu-{each}", **({"basic": fields} if basic else fields)})
    spec = {"driver": driver, "nodeName": node, "pool": {"name": pool or node}, "devices": listed}
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, ResourceSlice)


def claim(
    name: str, pods: str, memory: str | None, device: str = "gpu-0", **result: Any
) -> ResourceClaim:
    """Return a claim that the pods, one letter each, may use."""
    consumed = {} if memory is None else {"consumedCapacity": {"memory": memory}}
    place = {"driver": "gpu.nvidia.com", "pool": "n", "device": device}
    status = {
        "allocation": {"devices": {"results": [place | consumed | result]}},
        "reservedFor": [{"resource": "pods", "name": f"pod-{pod}", "uid": pod} for pod in pods],
    }
    return msgspec.convert(
        {"metadata": {"namespace": "t", "name": name}, "status": status}, ResourceClaim
    )


def report(unattributed: int | None = 0, **used_gib: float | None) -> GPUNodeStatus:
    """Return a report on GPU-0 of 80 GiB, with the use of each pod."""
    pods = [
        {
            "uid": uid,
            "device": "GPU-0",
            "namespace": "t",
            "name": f"pod-{uid}",
            "used": None if used is None else int(used * GIB),
        }
        for uid, used in used_gib.items()
    ]
    device = {"uuid": "GPU-0", "memory": 80 * GIB, "unattributed": unattributed}
    return msgspec.convert({"devices": [device], "pods": pods}, GPUNodeStatus)


def following(*seen: ResourceSlice | ResourceClaim) -> ClaimedDevices:
    devices = ClaimedDevices()
    devices.apply(
        [SliceSeen(each) if isinstance(each, ResourceSlice) else ClaimSeen(each) for each in seen],
        0.0,
    )
    return devices


def figures(
    devices: ClaimedDevices, status: GPUNodeStatus, now_s: float = 0.0
) -> Iterator[tuple[str, float, float | None, float]]:
    """Yield the uid, and the claimed, used and excess GiB."""
    for use in devices.uses("n", status, now_s):
        used = None if use.used_bytes is None else use.used_bytes / GIB
        yield use.uid, use.claimed_bytes / GIB, used, use.excess_bytes / GIB


@pytest.mark.parametrize(
    ("claims", "status", "expected"),
    [
        pytest.param(
            [claim("c", "a", "8Gi")], report(a=6), [("a", 8, 6, 0)], id="within the claim"
        ),
        pytest.param(
            [claim("c", "a", "8Gi")], report(a=9), [("a", 8, 9, 1)], id="beyond the claim"
        ),
        pytest.param([], report(a=3), [("a", 0, 3, 3)], id="no claim"),
        pytest.param([claim("c", "a", None)], report(a=70), [("a", 80, 70, 0)], id="whole device"),
        pytest.param([claim("c", "a", "8Gi")], report(), [("a", 8, 0, 0)], id="no use yet"),
        pytest.param([claim("c", "a", "8Gi")], report(a=None), [("a", 8, None, 0)], id="unknown"),
        pytest.param(
            [claim("c", "a", "8Gi"), claim("d", "b", "8Gi")],
            report(a=9, b=1),
            [("a", 8, 9, 1), ("b", 8, 1, 0)],
            id="unused memory of another pod does not offset it",
        ),
        pytest.param(
            [claim("c", "a", "8Gi"), claim("d", "a", "4Gi")],
            report(a=11),
            [("a", 12, 11, 0)],
            id="two claims of a pod",
        ),
        pytest.param(
            [claim("c", "ab", "8Gi")],
            report(a=5, b=5),
            [("a", 8, 5, 0), ("b", 8, 5, 2)],
            id="a claim that two pods share",
        ),
        pytest.param(
            [claim("c", "a", "8Gi", "gpu-1")], report(a=1), [("a", 0, 1, 1)], id="another device"
        ),
        pytest.param(
            [claim("c", "a", "8Gi", adminAccess=True)],
            report(a=1),
            [("a", 0, 1, 1)],
            id="admin access consumes nothing",
        ),
        pytest.param(
            [claim("c", "a", "8Gi", driver="nic.example.com")],
            report(a=1),
            [("a", 0, 1, 1)],
            id="another driver",
        ),
        pytest.param([], report(2 * GIB), [("", 0, 2, 2)], id="unattributed"),
        pytest.param([], report(64 << 20), [], id="unattributed, within the tolerance"),
        pytest.param([], report(None), [], id="no attribution"),
    ],
)
def test_use_without_a_claim_is_excess(
    claims: list[ResourceClaim], status: GPUNodeStatus, expected: list[tuple[Any, ...]]
) -> None:
    assert list(figures(following(piece(), *claims), status)) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([piece()], {"GPU-0": GPU_0, "GPU-1": GPU_1}, id="of the node"),
        pytest.param([piece(basic=True)], {"GPU-0": GPU_0, "GPU-1": GPU_1}, id="v1beta1"),
        pytest.param([piece(node="m")], {}, id="of another node"),
        pytest.param([piece(node=None, pool="n")], {}, id="without a node"),
        pytest.param([piece(driver="compute-domain.nvidia.com")], {}, id="of another driver"),
        pytest.param(
            [piece(), piece(node="m", pool="n", name="t")], {}, id="of the pool of another node"
        ),
    ],
)
def test_only_devices_of_the_nodes_own_slices_count(
    pieces: list[ResourceSlice], expected: dict[str, DraDevice]
) -> None:
    assert following(*pieces).devices("n") == expected


def test_a_claim_that_ended_accounts_for_use_until_the_report_shows_the_end() -> None:
    devices = following(piece(), claim("c", "a", "8Gi"))
    assert devices.apply([ClaimSeen(claim("c", "", "8Gi"))], 100.0) == {"n"}
    assert list(figures(devices, report(a=6), 100.0 + LINGERS_S)) == [("a", 8, 6, 0)]
    assert list(figures(devices, report(a=6), 100.1 + LINGERS_S)) == [("a", 0, 6, 6)]
    devices.apply([ClaimSeen(claim("d", "b", "8Gi"))], 200.0)
    assert devices.apply([ClaimGone("t", "d")], 200.0) == {"n"}
    assert list(figures(devices, report(b=6), 201.0)) == [("b", 8, 6, 0)]


def test_deleted_slices_and_claims_are_dropped() -> None:
    devices = following(piece(), claim("c", "a", "8Gi"))
    assert devices.sizes() == {"slices": 1, "claims": 1, "lingering": 0}
    changed = devices.apply([Relisted(ResourceClaim, (), 0.0), SliceGone("s")], 0.0)
    assert changed == {"n"}
    assert devices.nodes() == []
    assert devices.sizes() == {"slices": 0, "claims": 0, "lingering": 1}
    assert devices.apply([Relisted(ResourceSlice, (piece(name="u"),), 0.0)], 0.0) == {"n"}
    assert devices.devices("n") == {"GPU-0": GPU_0, "GPU-1": GPU_1}
    assert devices.apply([Relisted(ResourceSlice, (), 0.0)], 0.0) == {"n"}
    assert devices.devices("n") == {}
