"""Checks that a request that was parsed for an equal pod equals the pod's own request."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from headroom.contract.annotations import MAX_SM, POLICY, PROCESSES, STARTUP, VRAM
from headroom.contract.kube import (
    InitContainer,
    ObjectMeta,
    Pod,
    PodSpec,
    ResourceRequirements,
    Toleration,
)
from headroom.contract.pod_limits import (
    MAX_ANNOTATION_BYTES,
    MAX_ANNOTATIONS,
    MAX_NODE_TERMS,
    MAX_POD_BYTES,
)
from headroom.core.placement import request_reader
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest, understand
from headroom.core.placement.request_reader import MOST_PODS, RequestReader
from tests.builders import choosing, container, pod

RULES = Rules()
#: Values of everything on which a request depends. The first value of each part is the usual one.
PARTS: Mapping[str, Sequence[Any]] = {
    "name": ["p", "q"],
    "uid": ["p", "q"],
    "namespace": ["p", "q"],
    "version": ["1", "2"],
    "annotations": [
        {VRAM: "4Gi"},
        None,
        {VRAM: "25%"},
        {VRAM: "a=4Gi"},
        {VRAM: "lots"},
        {VRAM: "4Gi", POLICY: "spread"},
        {VRAM: "4Gi", MAX_SM: "70%"},
        {VRAM: "4Gi", PROCESSES: "2"},
        {VRAM: "4Gi", STARTUP: "alone"},
    ],
    "foreign_annotations": [0, MAX_ANNOTATIONS],
    "foreign_annotation_bytes": [0, MAX_ANNOTATION_BYTES],
    "container": ["a", "b"],
    "gpus": [1, 0, 2],
    "chooses": [False, True],
    "init": [None, "once", "Always"],
    "tolerations": [0, MAX_NODE_TERMS + 1],
    "json_bytes": [0, MAX_POD_BYTES + 1],
    "default_vram": [None, "1Gi", "lots"],
    "rules": [RULES, Rules(reject_unannotated=True)],
    "enforce_limits": [True, False],
}
USUAL = {part: values[0] for part, values in PARTS.items()}
UNUSUAL = [(part, value) for part, values in PARTS.items() for value in values[1:]]


def made(parts: Mapping[str, Any]) -> Pod:
    main = container(parts["container"], gpus=parts["gpus"])
    first = InitContainer(
        name="first",
        resources=ResourceRequirements(limits={"nvidia.com/gpu": "1"}),
        restart_policy=parts["init"],
    )
    metadata = ObjectMeta(
        name=parts["name"],
        namespace=parts["namespace"],
        uid=parts["uid"],
        resource_version=parts["version"],
        annotations=parts["annotations"],
        foreign_annotations=parts["foreign_annotations"],
        foreign_annotation_bytes=parts["foreign_annotation_bytes"],
    )
    spec = PodSpec(
        containers=[choosing(main) if parts["chooses"] else main],
        init_containers=[first] if parts["init"] else None,
        tolerations=[Toleration()] * parts["tolerations"],
    )
    return Pod(metadata=metadata, spec=spec, json_bytes=parts["json_bytes"])


@pytest.mark.parametrize("before", [USUAL, *({**USUAL, part: value} for part, value in UNUSUAL)])
def test_a_request_that_was_read_before_equals_the_pods_own_request(
    before: Mapping[str, Any],
) -> None:
    reader, unchanged = RequestReader(), ("name", before["name"])
    for part, value in [unchanged, *UNUSUAL, unchanged]:
        parts = {**before, part: value}
        of, how = made(parts), (parts["default_vram"], parts["rules"])
        found = reader.read(of, *how, enforce_limits=parts["enforce_limits"])
        assert found == understand(of, *how, enforce_limits=parts["enforce_limits"])


def test_pods_that_differ_only_in_their_names_are_parsed_once() -> None:
    reader, rules = RequestReader(), Rules()
    with patch.object(request_reader, "understand", wraps=understand) as parsed:
        for number in range(3):
            found = reader.read(pod("4Gi", uid=f"u{number}", name=f"p{number}"), None, rules)
            assert isinstance(found, VramRequest)
            assert (found.uid, found.name) == (f"u{number}", f"p{number}")
        assert parsed.call_count == 1
        reader.read(pod("4Gi"), None, Rules())
        assert parsed.call_count == 2


def test_the_number_of_kept_requests_is_limited() -> None:
    reader, rules = RequestReader(), Rules()
    for number in range(3 * MOST_PODS):
        reader.read(pod(f"{number + 1}Mi"), None, rules)
    assert len(reader._parsed) <= MOST_PODS
