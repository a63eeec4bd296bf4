"""Checks that the webhook rejects any input that is not a review as malformed."""

import json
import random
from typing import Any

import msgspec
import pytest

from headroom.webhook.review import MalformedReview, answer_mutate, answer_validate, read
from tests.admission.reviews import GATE_IMAGE, applied, around, manifest, node, patch_of, review
from tests.fuzz.hostile import garbled, mutated

EVERYTHING = around(
    node(choice="gated"),
    annotations={"headroom.gpu/default-vram": "4Gi", "headroom.gpu/share": "limit"},
    gate_image=GATE_IMAGE,
    mirror=True,
)


def answered(body: bytes) -> list[dict[str, Any]]:
    """Return the responses of the mutating and the validating path."""
    return [
        json.loads(decide(read(body), lambda name: EVERYTHING))
        for decide in (answer_mutate, answer_validate)
    ]


def test_a_response_has_the_uid_of_its_request() -> None:
    for whole in answered(json.dumps(review(manifest(None))).encode()):
        assert whole["apiVersion"] == "admission.k8s.io/v1"
        assert whole["kind"] == "AdmissionReview"
        assert whole["response"]["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
        assert whole["response"]["allowed"] is True


def test_a_rejection_has_the_status_of_the_api_server_for_invalid_fields() -> None:
    _, validating = answered(json.dumps(review(manifest("8GB"))).encode())
    assert validating["response"]["allowed"] is False
    status = validating["response"]["status"]
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert status["message"].startswith("Headroom: ")


def test_a_patch_applies_to_the_object_that_was_sent() -> None:
    obj = manifest(None)
    mutating, _ = answered(json.dumps(review(obj)).encode())
    assert mutating["response"]["patchType"] == "JSONPatch"
    stored = applied(obj, patch_of(mutating["response"]))
    assert stored["metadata"]["annotations"]["headroom.gpu/vram"] == "4Gi"
    assert stored["spec"]["initContainers"][0]["name"] == "headroom-gate"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body cannot be read"),
        (b"{", "the body cannot be read"),
        (b"[]", "the body cannot be read: Expected `object`, got `array`"),
        (b"\xff", "the body cannot be read"),
        (b"[" * 100_000, "the body cannot be read"),
        (b'{"apiVersion":"v1","kind":"Pod"}', "missing required field `request`"),
        (
            b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview",'
            b'"request":{"uid":"u","kind":{}}}',
            "'AdmissionReview' of 'admission.k8s.io/v1beta1' is not supported; "
            "send AdmissionReview of admission.k8s.io/v1",
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview",'
            b'"request":{"uid":"","kind":{}}}',
            "request.uid is empty",
        ),
        (json.dumps(review({"metadata": 7})).encode(), "request.object cannot be read"),
        (json.dumps(review(None)).encode(), "request.object cannot be read"),
    ],
)
def test_invalid_input_is_reported_with_its_position(body: bytes, message: str) -> None:
    with pytest.raises(MalformedReview) as found:
        answered(body)
    assert message in str(found.value)
    assert len(str(found.value)) < 400


SEEDS = [
    review(manifest(None, annotations={"headroom.gpu/gated": "true", "x": "y"})),
    review(manifest("main=8Gi"), operation="UPDATE", old=manifest("8Gi")),
    review(
        {"metadata": {}, "spec": {"jobTemplate": {"spec": {"template": manifest()}}}},
        kind="CronJob",
    ),
    review({"metadata": {"annotations": {"headroom.gpu/reserve": "1Gi"}}}, kind="Node"),
]


def test_any_input_is_answered_or_rejected_as_malformed() -> None:
    """Sends five thousand hostile reviews, and applies every patch in the responses."""
    lots, read_well = random.Random(9), 0
    for _ in range(5000):
        body = msgspec.json.encode(mutated(lots.choice(SEEDS), lots, SEEDS))
        if lots.random() < 0.2:
            body = garbled(body, lots)
        try:
            mutating, validating = answered(body)
        except MalformedReview:
            continue
        read_well += 1
        assert {mutating["kind"], validating["kind"]} == {"AdmissionReview"}
        operations = patch_of(mutating["response"])
        if operations:
            # Fields that the webhook does not read can contain invalid UTF-8.
            obj = json.loads(body.decode("utf-8", "replace"))["request"]["object"]
            applied(obj, operations)
    assert read_well > 900
