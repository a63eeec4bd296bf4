"""Pods that set NVIDIA_VISIBLE_DEVICES themselves."""

from typing import Any, Literal

import msgspec
import pytest

from contract.gpunode import Plugin
from contract.kube import EnvVar, Pod, Present
from contract.reasons import Reason
from extender.cluster.events import GPUNodeSeen, NodeSeen
from extender.cluster.state import ClusterState
from extender.placement.fit import fit
from extender.placement.snapshot import CODE_OF
from extender.placement.weighing import Weighings
from tests.builders import NOW_S, container, device, gpunode, kube_node, pod
from tests.cluster.test_state import state_of

NAME = "NVIDIA_VISIBLE_DEVICES"
Pinning = Literal["honoured", "ignored", "unknown"]


def setting(*variables: EnvVar, where: str = "gpu", uid: str = "uid-p") -> Pod:
    """A pod whose GPU container, its neighbour or its init container has these variables."""
    named = {
        "gpu": container(),
        "neighbour": container("other", gpus=0),
        "init": container("first", gpus=0),
    }
    named[where] = msgspec.structs.replace(named[where], env=list(variables))
    return pod("8Gi", named["gpu"], named["neighbour"], init=[named["init"]], uid=uid, name=uid)


def node(pinning: Pinning) -> ClusterState:
    reported = gpunode(device())
    assert reported.status is not None
    status = msgspec.structs.replace(reported.status, plugin=Plugin(pinning=pinning))
    reported = msgspec.structs.replace(reported, status=status)
    return state_of(NodeSeen(kube_node()), GPUNodeSeen(reported, NOW_S))


def verdict(state: ClusterState, of: Pod) -> Reason | None:
    request: Any = state.understand(of)
    snap = state.snapshot()
    reason = fit(request, snap, snap.rows(["n"]), NOW_S).reason(0)
    held = state.gpunode("n")
    assert held is not None
    judged = state.judge(of, held, NOW_S)
    assert (judged if isinstance(judged, Reason) else None) is reason
    return reason


@pytest.mark.parametrize(
    ("pinning", "reason"),
    [
        pytest.param("honoured", Reason.CHOOSES_DEVICES, id="it wins"),
        pytest.param("unknown", Reason.CHOOSES_DEVICES, id="it may win"),
        pytest.param("ignored", None, id="it is not looked at"),
    ],
)
@pytest.mark.parametrize("where", ["gpu", "neighbour", "init"])
def test_it_counts_where_it_may_be_obeyed(
    pinning: Pinning, reason: Reason | None, where: str
) -> None:
    assert verdict(node(pinning), setting(EnvVar(name=NAME, value="all"), where=where)) is reason


@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        pytest.param(EnvVar(name=NAME, value="GPU-0"), True, id="a device"),
        pytest.param(EnvVar(name=NAME, value_from=Present()), True, id="what cannot be read"),
        pytest.param(EnvVar(name=NAME, value="none"), False, id="none"),
        pytest.param(EnvVar(name=NAME, value="void"), False, id="void"),
        pytest.param(EnvVar(name=NAME), False, id="empty"),
        pytest.param(EnvVar(name="NVIDIA_DRIVER_CAPABILITIES", value="all"), False, id="another"),
    ],
)
def test_values(variable: EnvVar, counts: bool) -> None:
    assert (verdict(node("honoured"), setting(variable)) is not None) == counts


def test_as_it_stands_in_a_manifest() -> None:
    manifest = {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                    "env": [
                        {"name": "A", "value": "b"},
                        {"name": NAME, "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                    ],
                }
            ]
        },
    }
    read = msgspec.json.decode(msgspec.json.encode(manifest), type=Pod)
    assert verdict(node("honoured"), read) is Reason.CHOOSES_DEVICES


def test_what_was_kept_of_a_pod_that_does_not_is_not_said_of_one_that_does() -> None:
    state, weighings = node("honoured"), Weighings()
    plain: Any = state.understand(setting())
    chooses: Any = state.understand(setting(EnvVar(name=NAME, value="all")))
    snap = state.snapshot()
    rows = snap.rows(["n"])
    said = [weighings.weigh(r, snap).codes(snap, rows, NOW_S)[0] for r in (plain, chooses)]
    assert said == [0, CODE_OF[Reason.CHOOSES_DEVICES]]
