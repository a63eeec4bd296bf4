"""Tests limits of one pod, and the messages about them."""

from typing import Any

import msgspec
import pytest

from headroom.contract import pod_limits
from headroom.contract.kube import Container, Pod, ResourceRequirements
from headroom.contract.pod_limits import annotation_bytes, exceeded, has_room_for, sized
from tests.builders import container, pod
from tests.controlplane import ROOT

MAX_POD_BYTES = 1 << 20

FOREIGN = "example.com/notes"


def constrained(**spec: Any) -> Pod:
    wire = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main"}], **spec}}
    return msgspec.convert(wire, Pod)


def affinity(terms: int, values: int) -> dict[str, Any]:
    one = {"key": "pool", "operator": "In", "values": [f"v{i}" for i in range(values)]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [one]}] * terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def requesting(resources: int) -> Container:
    amounts = {f"a.b/{i}": "1" for i in range(resources)}
    return Container(name="main", resources=ResourceRequirements(limits=amounts))


@pytest.mark.parametrize(
    ("fits", "exceeds", "what"),
    [
        pytest.param(
            pod("1Gi", *(container(f"c{i}") for i in range(64))),
            pod("1Gi", *(container(f"c{i}") for i in range(65))),
            "65 containers and init containers, but at most 64",
            id="containers",
        ),
        pytest.param(
            pod(None, annotations={f"headroom.gpu/devices.{i}": "" for i in range(256)}),
            pod(None, annotations={f"headroom.gpu/devices.{i}": "" for i in range(257)}),
            "257 annotations, but at most 256",
            id="our annotations",
        ),
        pytest.param(
            pod("1Gi", annotations={f"a/{i}": "" for i in range(255)}),
            pod("1Gi", annotations={f"a/{i}": "" for i in range(256)}),
            "257 annotations, but at most 256",
            id="annotations",
        ),
        pytest.param(
            pod("1Gi", requesting(64)),
            pod("1Gi", requesting(65)),
            "65 resources in one container, but at most 64",
            id="resources",
        ),
        pytest.param(
            pod("x" * ((32 << 10) - len("headroom.gpu/vram"))),
            pod("x" * ((32 << 10) - len("headroom.gpu/vram") + 1)),
            "32769 bytes in annotations headroom.gpu/*, but at most 32768",
            id="bytes of our annotations",
        ),
        pytest.param(
            pod(None, annotations={FOREIGN: "x" * ((248 << 10) - len(FOREIGN))}),
            pod(None, annotations={FOREIGN: "x" * ((248 << 10) - len(FOREIGN) + 1)}),
            "253953 bytes in annotations, but at most 253952",
            id="bytes of all annotations",
        ),
        pytest.param(
            constrained(tolerations=[{"operator": "Exists"}] * 64),
            constrained(tolerations=[{"operator": "Exists"}] * 65),
            "65 tolerations, and terms and expressions of node affinity, but at most 64",
            id="tolerations",
        ),
        pytest.param(
            sized(pod("1Gi"), 1 << 20),
            sized(pod("1Gi"), (1 << 20) + 1),
            "1048577 bytes, but at most 1048576",
            id="bytes of the pod",
        ),
        pytest.param(
            constrained(affinity=affinity(32, 1)),
            constrained(affinity=affinity(32, 1), tolerations=[{"operator": "Exists"}]),
            "65 tolerations, and terms and expressions of node affinity, but at most 64",
            id="terms",
        ),
        pytest.param(
            constrained(affinity=affinity(2, 512)),
            constrained(affinity=affinity(2, 512), nodeSelector={"a": "b"}),
            "1025 node selector entries and node affinity values, but at most 1024",
            id="values",
        ),
    ],
)
def test_a_pod_is_accepted_up_to_the_limit_but_not_beyond(
    fits: Pod, exceeds: Pod, what: str
) -> None:
    assert exceeded(fits) == ""
    assert exceeded(exceeds).startswith(f"pod has {what} are allowed with a GPU; ")


def test_annotations_are_measured_in_utf_8_bytes() -> None:
    assert annotation_bytes({"k": "\u00fc"}) == 3


def test_a_placement_and_a_later_mark_fit_into_the_annotations() -> None:
    written = {"headroom.gpu/placement": "x" * 4000}
    room = (256 << 10) - 512 - annotation_bytes(written) - len(FOREIGN)
    assert has_room_for(pod(None, annotations={FOREIGN: "x" * room}), written)
    assert not has_room_for(pod(None, annotations={FOREIGN: "x" * (room + 1)}), written)
    # Repeated writes need no more space than one write.
    again = {FOREIGN: "x" * room, "headroom.gpu/placement": "y" * 4000}
    assert has_room_for(pod(None, annotations=again), written)


def test_the_size_of_a_pod_is_kept_only_if_it_matters() -> None:
    assert sized(pod("1Gi"), MAX_POD_BYTES) == pod("1Gi")
    assert sized(pod("1Gi"), MAX_POD_BYTES + 1).json_bytes == MAX_POD_BYTES + 1


def test_every_limit_is_documented() -> None:
    text = (ROOT / "docs/design/admission.md").read_text()
    limits = {name: value for name, value in vars(pod_limits).items() if name.startswith("MAX_")}
    assert len(limits) == 8
    for value in limits.values():
        shown = f"{value >> 10} KiB" if value >= 1 << 14 else str(value)
        assert f"| {shown} |" in text
