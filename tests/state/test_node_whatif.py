"""Checks pods against an autoscaler's templates of nodes that do not exist yet."""

import json

import msgspec
import pytest

from headroom.contract.annotations import MAX_SM
from headroom.contract.reasons import Reason
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest, understand
from headroom.core.placement.snapshot import REASONS
from headroom.core.whatif.node_whatif import codes_of_new
from tests.builders import pod
from tests.state.labels import SLICED, gfd, gke

MOST_NODES = 100


def item(
    name: str = "new", labels: dict[str, str] = SLICED, gpus: int = 16, **annotations: str
) -> msgspec.Raw:
    written = {f"headroom.gpu/{key.replace('_', '-')}": text for key, text in annotations.items()}
    metadata = {"name": name, "labels": labels, "annotations": written}
    status = {"capacity": {"nvidia.com/gpu": gpus}, "allocatable": {"nvidia.com/gpu": gpus}}
    return msgspec.Raw(json.dumps({"metadata": metadata, "status": status}).encode())


def reasons(*items: msgspec.Raw, **annotations: str) -> list[Reason | None]:
    rules = Rules()
    request = understand(pod("40Gi", annotations=annotations), None, rules)
    assert isinstance(request, VramRequest)
    return [REASONS[code] for code in codes_of_new(items, request, rules)]


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        pytest.param(item(), None, id="shared, with require_report"),
        pytest.param(item(labels=gfd(), gpus=4), None, id="unshared"),
        pytest.param(
            item(labels=gke(accelerator="nvidia-l4"), gpus=1),
            Reason.MEMORY_ON_ANY,
            id="too small, by GKE's labels",
        ),
        pytest.param(item(reserve="60Gi"), Reason.MEMORY_ON_ANY, id="annotated reserve"),
        pytest.param(item(reserve="much"), Reason.BAD_NODE_ANNOTATION, id="invalid annotation"),
        pytest.param(item(device_choice="gated"), Reason.NO_GATE, id="for gated pods only"),
        pytest.param(item(gpus=15), Reason.LABELS_INCOMPLETE, id="contradictory"),
        pytest.param(item(labels={}), Reason.LABELS_INCOMPLETE, id="no labels"),
        pytest.param(
            item(labels={**SLICED, "nvidia.com/mig.config.state": "pending"}),
            Reason.MIG_CHANGING,
            id="MIG",
        ),
        pytest.param(
            msgspec.Raw(b'{"metadata":{"name":"new","labels":{"nvidia.com/gpu.count":4}}}'),
            Reason.UNKNOWN_NODE,
            id="unreadable",
        ),
    ],
)
def test_labels_capacity_and_annotations_of_the_template_decide(
    node: msgspec.Raw, reason: Reason | None
) -> None:
    assert reasons(node) == [reason]


def test_allocatable_defaults_to_capacity_as_in_kubernetes() -> None:
    message = bytes(item())
    assert reasons(msgspec.Raw(message.replace(b"allocatable", b"images"))) == [None]
    assert reasons(msgspec.Raw(message.replace(b'"capacity"', b'"images"'))) == [None]


def test_the_sms_of_a_new_node_are_idle() -> None:
    assert reasons(item(), **{MAX_SM: "10%"}) == [None]


def test_the_work_of_one_call_is_limited() -> None:
    found = reasons(*(item(f"new-{number}") for number in range(MOST_NODES + 1)))
    assert found == [*[None] * MOST_NODES, Reason.UNKNOWN_NODE]
