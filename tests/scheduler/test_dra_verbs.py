"""Tests kube-scheduler's calls for nodes on which it allocates GPUs itself with DRA."""

import json
from typing import Any

import msgspec

from extender.scheduler.server import Verbs
from headroom.contract.annotations import POLICY
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen
from tests.builders import DISTRIBUTED, GPU, NOW_S, gpunode, pod, shared
from tests.recording import RecordingState
from tests.scheduler.verbs_on import verbs_on
from tests.state.dra import class_of, node, slice_of
from tests.state.states import state_of

NAMES = ["plugin", "dra-1", "dra-2"]


def cluster(free: int) -> RecordingState:
    """Return a cluster with one node that has a device plugin, and two nodes that have none."""
    state = state_of(node("plugin", {GPU: "4"}), class_of())
    plugin = gpunode(shared("GPU-plugin", free, 4 - free), name="plugin", plugin=DISTRIBUTED)
    state.apply([GPUNodeSeen(plugin, NOW_S)])
    for name in NAMES[1:]:
        state.apply([node(name), slice_of(name, f"GPU-{name}")])
        report = gpunode(shared(f"GPU-{name}", 0, resource=""), name=name, plugin=DISTRIBUTED)
        state.apply([GPUNodeSeen(report, NOW_S)])
    return state


def asking(of: Pod, names: list[str]) -> bytes:
    body = {"Pod": json.loads(msgspec.json.encode(of)), "Nodes": None, "NodeNames": names}
    return json.dumps(body).encode()


def passed(verbs: Verbs, of: Pod) -> set[str]:
    answer: dict[str, Any] = json.loads(verbs.filter(asking(of, NAMES)))
    return set(answer["NodeNames"])


def scores(verbs: Verbs, of: Pod, names: list[str]) -> dict[str, int]:
    ranked = json.loads(verbs.prioritize(asking(of, names))) or []
    return {each["Host"]: each["Score"] for each in ranked if each["Score"]}


def test_the_node_with_the_device_plugin_is_preferred() -> None:
    """This also holds for a policy that prefers empty nodes, because the use of nodes with DRA is
    unknown.
    """
    for policy in ("spread", "pack"):
        whole = pod(None, annotations={POLICY: policy})
        verbs = verbs_on(cluster(free=4), lambda: NOW_S)
        assert passed(verbs, whole) == set(NAMES)
        assert scores(verbs, whole, NAMES) == {"plugin": 10}
        best_only = verbs_on(cluster(free=4), lambda: NOW_S, best_only=True)
        assert passed(best_only, whole) == {"plugin"}


def test_kube_scheduler_chooses_among_nodes_with_dra() -> None:
    for best_only in (False, True):
        verbs = verbs_on(cluster(free=0), lambda: NOW_S, best_only=best_only)
        assert passed(verbs, pod(None)) == {"dra-1", "dra-2"}
        assert scores(verbs, pod(None), ["dra-1", "dra-2"]) == {}


def test_pods_without_a_memory_request_pass_while_kube_scheduler_offers_the_node() -> None:
    """The assumed binds of such pods hold no memory that Headroom counts."""
    verbs = verbs_on(cluster(free=0), lambda: NOW_S)
    for number in range(4):
        of = pod(None, uid=f"u{number}", name=f"p{number}")
        answer = json.loads(verbs.filter(asking(of, ["dra-1"])))
        assert answer["NodeNames"] == ["dra-1"]
