"""Checks that each reader handles any object that the CRDs permit, and still serves all other
objects.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.gate_decision import Limits, judge
from agent.steering.choice import choose
from agent.steering.messages import ContainerRequest
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.kube import ObjectMeta
from headroom.contract.vramprofile import ProfileOwner, decode_profile
from headroom.contract.watched import GPUNodeSeen, PodSeen, ProfileSeen
from headroom.core.recommend.profile_status import newest_requests
from headroom.recorder.life_tracker import LifeTracker
from headroom.recorder.pod_facts import ObservedPod
from headroom.recorder.profile_book import Owned, ProfileBook
from headroom.runtime.kube.profiles import Profiles
from tests.admission.reviews import around, manifest, mutated
from tests.console.asking import answer
from tests.contract.admitted import Schema, drawn
from tests.contract.test_crd import HOSTILE, levels
from tests.contract.test_crd import SCHEMA as GPUNODE
from tests.contract.test_vramprofile import SCHEMA as PROFILE
from tests.controlplane import ROOT as REPOSITORY
from tests.controlplane import ApiRefused, ControlPlane
from tests.examples import examples
from tests.fuzz.samples import BAD
from tests.fuzz.watch import WatchTarget
from tests.fuzz.world import Attacked
from tests.recorder.facts import NODE, NOW_S, facts, report, use
from tests.recorder.test_recording import asked, create
from tests.recorder.test_rounds import KEY
from tests.recorder.test_rounds import RecorderRounds as Recording
from tests.waiting import until

ROOT = "/apis/headroom.gpu/v1alpha1"
PROFILE_CRD = REPOSITORY / "deploy/base/crd-vramprofile.yaml"
CONSOLE, CLUSTER = Attacked(), WatchTarget("gpunodes", listed=False)
SEEDS = st.integers(0, 1 << 32)
_PROFILES = jsonschema_rs.Draft7Validator(PROFILE)
_GPUNODES = jsonschema_rs.Draft7Validator(GPUNODE)


def drawn_profile(seed: int) -> dict[str, Any]:
    tree: dict[str, Any] = drawn(PROFILE, Random(seed))
    metadata = {"name": "deployment-llm", "namespace": "team", "resourceVersion": "1"}
    return tree | {"metadata": metadata, "status": tree.get("status", {})}


def drawn_gpunode(seed: int) -> dict[str, Any]:
    tree: dict[str, Any] = drawn(GPUNODE, Random(seed))
    return tree | {"metadata": {"name": BAD, "uid": "bad", "resourceVersion": str(seed)}}


@settings(max_examples=examples(200))
@given(SEEDS)
def test_the_recorder_writes_an_admitted_profile_after_reading_any_profile(seed: int) -> None:
    tree = drawn_profile(seed)
    _PROFILES.validate(tree)
    profile = decode_profile(json.dumps(tree).encode())
    newest_requests(profile.status, NOW_S, {})
    book, tracker = ProfileBook(), LifeTracker()
    book.load([profile])
    book.forgotten(NOW_S)
    tracker.follow({NODE: report(use(8))}, {"u1": facts()}, {}, NOW_S)
    ended = tracker.follow({NODE: report()}, {}, {"u1": facts()}, NOW_S)
    book.take([Owned(each, ProfileOwner(kind="Deployment", name="llm")) for each in ended], [])
    (key,) = book.due(NOW_S, 9)
    _PROFILES.validate(msgspec.json.decode(msgspec.json.encode(book.write(key, NOW_S).profile)))


@settings(max_examples=examples(200))
@given(SEEDS)
def test_the_webhook_answers_with_any_profile(seed: int) -> None:
    tree = drawn_profile(seed)
    tree["status"]["controllers"] = [{"kind": "Pod", "name": "p"}]
    profiles = Profiles()
    profiles.apply([ProfileSeen(decode_profile(json.dumps(tree).encode()))])
    where = replace(around(), profile=lambda _, by: profiles.of("team", by), now_s=NOW_S)
    pod, _ = mutated(manifest("auto,default=2Gi"), where)
    assert "auto" not in pod["metadata"]["annotations"]["headroom.gpu/vram"]


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS)
def test_the_console_shows_any_profile(seed: int) -> None:
    seen = decode_profile(json.dumps(drawn_profile(seed)).encode())
    CONSOLE.deliver_for_people([ProfileSeen(seen)])
    for path in ("/v1/recommendations?accepted=true", "/v1/snapshot"):
        reply = answer(CONSOLE.console, "GET", path)
        assert reply.status_code == 200, reply.text
        json.loads(reply.text)


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS)
def test_any_gpunode_affects_no_other_node(seed: int) -> None:
    """The target raises ``Harm`` if a valid node or a response about a valid node changes, or if a
    view fails.
    """
    tree = drawn_gpunode(seed)
    _GPUNODES.validate(tree)
    body = json.dumps(tree).encode()
    decode_gpunode(body)
    assert CLUSTER.take(b'{"type":"MODIFIED","object":%b}\n' % body)
    CLUSTER.offer_beside()
    CLUSTER.show(body)
    CLUSTER.check()


@settings(max_examples=examples(200))
@given(SEEDS)
def test_the_agent_reads_any_gpunode(seed: int) -> None:
    node = decode_gpunode(json.dumps(drawn_gpunode(seed)).encode())
    status = node.status or GPUNodeStatus()
    for uid in [*node.spec.reservations, "unknown"]:
        judge(node, status, uid, Limits(0, 64 << 20))
    wanted = ContainerRequest(("GPU-a::0", "GPU-b::0"), (), 1)
    choose(wanted, "nvidia.com/gpu", node.spec, status, (), Limits(0, 0))


@settings(max_examples=examples(400), deadline=None)
@given(SEEDS)
def test_the_recorder_records_other_nodes_next_to_any_gpunode(seed: int) -> None:
    recording = Recording()
    node = decode_gpunode(json.dumps(drawn_gpunode(seed)).encode())
    hostile = facts(name="hostile", controller=None, node=BAD)
    pods = {use.uid for use in node.status.pods} if node.status else set()
    recording.api.owners = {"hostile": ProfileOwner(kind="Pod", name="hostile", family=True)}
    recording.observed.apply(
        [
            GPUNodeSeen(node, 0.0),
            *(
                PodSeen(ObservedPod(ObjectMeta(name="hostile", uid=uid), facts=hostile))
                for uid in pods - {"u1"}
            ),
        ]
    )
    recording.see(facts(), use(8))
    for _ in range(2):
        recording.round(1000)
    for profile in recording.api.profiles.values():
        _PROFILES.validate(msgspec.json.decode(msgspec.json.encode(profile)))
    assert KEY in recording.api.profiles


TIME, MERGE = "2026-11-21T00:00:00Z", "application/merge-patch+json"


def _valid(schema: Schema) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("format") == "date-time":
        return TIME
    return {"object": {}, "integer": 1, "number": 0.5, "array": []}.get(
        schema["type"], "a" * schema.get("minLength", 0)
    )


def with_text(schema: Schema, path: Sequence[str], text: str) -> Any:
    """Return the smallest value of the schema that has ``text`` at a path."""
    if not path:
        return text
    first, rest = path[0], path[1:]
    if first == "[]":
        return [with_text(schema["items"], rest, text)]
    if first == "{}":
        return {"key": with_text(schema["additionalProperties"], rest, text)}
    needed = {name: schema["properties"][name] for name in schema.get("required", ())}
    values = {name: _valid(each) for name, each in needed.items()}
    return values | {first: with_text(schema["properties"][first], rest, text)}


def texts_of(schema: Schema) -> list[tuple[tuple[str, ...], str]]:
    """Return the path and a valid value of each string field, except kind and apiVersion."""
    return [
        (tuple(re.findall(r"\w+|\[\]|\{\}", path)), _valid(each))
        for path, each in levels(schema)
        if each["type"] == "string" and path not in (".apiVersion", ".kind")
    ]


@pytest.mark.slow
def test_the_api_server_rejects_text_that_kubectl_would_not_show_unchanged(
    plane: ControlPlane,
) -> None:
    create(plane, yaml.safe_load(PROFILE_CRD.read_text()))
    nodes, profiles = f"{ROOT}/gpunodes", f"{ROOT}/namespaces/default/vramprofiles"
    until(lambda: asked(plane, profiles) is not None, "VRAMProfiles are served")
    admitted = []
    for kind, schema, url in (("GPUNode", GPUNODE, nodes), ("VRAMProfile", PROFILE, profiles)):
        made = {"apiVersion": "headroom.gpu/v1alpha1", "kind": kind, "metadata": {"name": "texts"}}
        plane.call("POST", url, made)
        for (path, valid), hostile in product(texts_of(schema), (None, *HOSTILE)):
            of_status = kind == "GPUNode" and path[0] == "status"
            target = f"{url}/texts/status" if of_status else f"{url}/texts"
            value = with_text(schema, path, valid if hostile is None else hostile)
            if hostile is None:
                plane.call("PATCH", target, value)
                continue
            try:
                plane.call("PATCH", target, value)
                admitted.append((kind, path, hostile))
            except ApiRefused as err:
                if ": 422 " not in str(err):
                    raise
    assert admitted == []


@pytest.mark.slow
def test_the_api_server_admits_the_drawn_objects(plane: ControlPlane) -> None:
    """This shows that a real API server would store the objects of the tests above."""
    create(plane, yaml.safe_load(PROFILE_CRD.read_text()))
    nodes, profiles = f"{ROOT}/gpunodes", f"{ROOT}/namespaces/default/vramprofiles"
    until(lambda: asked(plane, profiles) is not None, "VRAMProfiles are served")
    for seed in range(40):
        node, profile = drawn_gpunode(seed), drawn_profile(seed)
        node["metadata"] = {"name": f"admitted-{seed}"}
        node.setdefault("status", {})
        profile["metadata"] = {"name": f"admitted-{seed}"}
        node |= {"apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode"}
        profile |= {"apiVersion": "headroom.gpu/v1alpha1", "kind": "VRAMProfile"}
        plane.call("POST", profiles, profile)
        made = plane.call("POST", nodes, node)
        stored = plane.call(
            "PUT", f"{nodes}/admitted-{seed}/status", made | {"status": node["status"]}
        )
        assert stored.get("spec") == node.get("spec")
        assert stored["status"] == node["status"]
