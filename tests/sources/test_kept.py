"""What is kept of a pod: all that a decision hangs on, and no more than that."""

from typing import Any

import msgspec
import pytest

from contract.gate import GATE, waits
from contract.kube import Pod
from extender.cluster.waking import refused_by_us
from extender.placement.request import understand
from extender.placement.rules import Rules
from extender.sources.kinds import watched_kinds

DECODE = next(kind for kind in watched_kinds("any") if kind.name == "pods").decode
ALL = msgspec.json.Decoder(Pod).decode
VISIBLE = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}
OTHER = {"name": "MODEL", "value": "/models/large"}
FOLLOWS = {
    "name": "NVIDIA_VISIBLE_DEVICES",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['headroom.gpu/devices.0']"}},
}
RUNNING = {"name": "main", "state": {"running": {}}}
OVER = {"name": "main", "state": {"terminated": {"exitCode": 0}}}
REFUSED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 insufficient GPU memory on any device.",
}


def raw(env: Any = (), node: str = "", phase: str = "Pending", **status: Any) -> msgspec.Raw:
    gpu = {"limits": {"nvidia.com/gpu": "1"}}
    containers = [{"name": "main", "env": [*env], "resources": gpu}, {"name": "beside"}]
    metadata = {"name": "p", "uid": "u", "annotations": {"headroom.gpu/vram": "8Gi"}}
    spec = {"containers": containers, "initContainers": containers, "nodeName": node}
    pod = {"metadata": metadata, "spec": spec, "status": {"phase": phase, **status}}
    return msgspec.Raw(msgspec.json.encode(pod))


@pytest.mark.parametrize("env", [[OTHER], [OTHER, VISIBLE, OTHER], [FOLLOWS, OTHER], []])
def test_it_asks_for_the_same(env: list[Any]) -> None:
    kept, whole = DECODE(raw(env)), ALL(raw(env))
    assert isinstance(kept, Pod)
    assert understand(kept, None, Rules()) == understand(whole, None, Rules())
    of_main = (kept.spec.containers or [])[0].env or []
    assert {variable.name for variable in of_main} <= {"NVIDIA_VISIBLE_DEVICES"}
    assert len(of_main) == len([each for each in env if each != OTHER])
    assert kept.spec.init_containers == kept.spec.containers


@pytest.mark.parametrize("node", ["", "n"])
def test_why_it_waits_is_kept_until_it_is_bound(node: str) -> None:
    kept = DECODE(raw(node=node, conditions=[REFUSED]))
    assert isinstance(kept, Pod)
    assert refused_by_us(kept) == (not node)


@pytest.mark.parametrize("node", ["", "n"])
@pytest.mark.parametrize("phase", ["Pending", "Running", "Succeeded", "Failed"])
@pytest.mark.parametrize("which", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize("container", [RUNNING, OVER], ids=["running", "over"])
def test_it_has_ended_when_it_has(node: str, phase: str, which: str, container: Any) -> None:
    sent = raw(node=node, phase=phase, **{which: [container]})
    kept = DECODE(sent)
    assert isinstance(kept, Pod)
    assert kept.ended == ALL(sent).ended
    assert kept.node == node


@pytest.mark.parametrize("state", [{}, {"terminated": {"exitCode": 0}}], ids=["shut", "open"])
def test_its_gate_is_open_when_it_is(state: dict[str, Any]) -> None:
    status = {"phase": "Pending", "initContainerStatuses": [{"name": GATE, "state": state}]}
    spec = {"nodeName": "n", "initContainers": [{"name": GATE}]}
    kept = DECODE(
        msgspec.Raw(msgspec.json.encode({"metadata": {}, "spec": spec, "status": status}))
    )
    assert isinstance(kept, Pod)
    assert waits(kept) == (not state)


def test_of_a_running_pod_half_is_kept() -> None:
    beside = {"conditions": [REFUSED] * 4, "containerStatuses": [RUNNING]}
    sent = raw([OTHER] * 10, node="n", phase="Running", **beside)
    assert len(msgspec.json.encode(DECODE(sent))) < len(msgspec.json.encode(ALL(sent))) / 2
