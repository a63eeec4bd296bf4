"""Checks that entries of other device plugins in the kubelet's records hide no GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.probes.checkpoint import Entry
from agent.probes.kubelet import KubeletProbe, join
from agent.probes.podresources import ListedContainer, PodResources
from agent.probes.protobuf import field
from agent.probes.readings import HoldingReading, SourceReading
from tests.agent.records import GPU, entry, record
from tests.agent.test_checkpoint import parsed
from tests.agent.test_kubelet import held, listed


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        pytest.param({"DeviceIDs": {"-1": ["d" * 257]}}, 0, id="a long device"),
        pytest.param({"PodUID": "u" * 200, "ContainerName": "c" * 64}, 0, id="long names"),
        pytest.param({"DeviceIDs": {"x": ["a"]}}, 0, id="a NUMA node that is not a number"),
        pytest.param({"DeviceIDs": None, "AllocResp": "%"}, 0, id="not base64"),
        pytest.param({"PodUID": 7}, 1, id="a uid that is a number"),
        pytest.param({"DeviceIDs": {"-1": [7]}}, 1, id="a device that is a number"),
        pytest.param({"DeviceIDs": {"-1": "x"}}, 1, id="devices that are not a list"),
    ],
)
def test_an_entry_of_another_plugin_hides_no_other_entry(
    changes: dict[str, Any], left_out: int, tmp_path: Path
) -> None:
    foreign = entry("other", ResourceName="x.io/dev") | changes
    file = record(foreign, entry("u"), RegisteredDevices={GPU: ["GPU-a::0"], "x.io/dev": None})
    found = parsed(file)
    assert [e.replicas for e in found.entries if e.pod_uid == "u"] == [("GPU-a::0",)]
    assert found.registered == {GPU: ("GPU-a::0",), "x.io/dev": ()}
    assert found.left_out == left_out
    for each in found.entries:
        assert len(each.pod_uid) <= 128
        assert len(each.container) <= 63
        assert all(len(replica) <= 256 for replica in each.replicas)
    (tmp_path / "checkpoint").write_text(json.dumps(file))
    readings = list(KubeletProbe(tmp_path / "checkpoint", tmp_path / "no socket").read())
    assert "u" in [r.uid for r in readings if isinstance(r, HoldingReading)]
    (source,) = [r for r in readings if isinstance(r, SourceReading) and r.source == "checkpoint"]
    assert ("cannot be read: 1" in source.message) == bool(left_out)


def test_an_unreadable_resource_hides_no_other_resource() -> None:
    found = parsed(record(RegisteredDevices={"x.io/dev": [7], GPU: ["GPU-a::0"]}))
    assert (found.registered, found.left_out) == ({GPU: ("GPU-a::0",)}, 1)


def test_pods_with_equal_foreign_devices_are_identified_by_their_gpus() -> None:
    """The IDs of the foreign devices are too long for the report."""
    foreign = [Entry(uid, "main", "x.io/dev", ()) for uid in "uv"]
    names = [ListedContainer("ns", pod, "main", {"x.io/dev": frozenset()}) for pod in "pq"]
    gpus = [listed("p", "a"), listed("q", "b")]
    joined = join([*foreign, held("u", "a"), held("v", "b")], [*names, *gpus], {})
    assert [(h.uid, h.name) for h in joined.holdings] == [("u", "p"), ("v", "q")]
    assert not joined.ambiguous


def _message(*parts: tuple[int, bytes | str]) -> bytes:
    return b"".join(field(number, value) for number, value in parts)


class _Answers(PodResources):
    """A PodResources client that returns encoded responses."""

    def __init__(self, devices: bytes) -> None:
        super().__init__("")
        self.devices = devices

    def _call(self, method: str) -> bytes:
        ours = _message((1, GPU), (2, "GPU-a::0"))
        if method == "GetAllocatableResources":
            return _message((1, self.devices), (1, ours))
        bad = _message((1, "main"), (2, self.devices))
        good = _message((1, "main"), (2, ours))
        return b"".join(
            _message((1, _message((1, name), (2, "ns"), (3, container))))
            for name, container in (("other", bad), ("p", good))
        )


@pytest.mark.parametrize(
    ("devices", "left_out"),
    [
        pytest.param(_message((1, "x.io/dev"), (2, b"\xff")), 2, id="not text"),
        pytest.param(b"\x0a\x7f", 2, id="truncated"),
        pytest.param(_message((1, "x.io/dev"), (2, "d" * 257)), 0, id="long"),
    ],
)
def test_devices_of_another_plugin_hide_no_pod(devices: bytes, left_out: int) -> None:
    service = _Answers(devices)
    ours = [each for each in service.containers() if each.pod == "p"]
    assert ours == [ListedContainer("ns", "p", "main", {GPU: frozenset({"GPU-a::0"})})]
    assert service.healthy()[GPU] == {"GPU-a::0"}
    assert service.left_out == left_out
