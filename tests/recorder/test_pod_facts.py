"""Tests the facts that the recorder keeps of a pod."""

import pytest

from headroom.contract.annotations import Bytes, Share
from headroom.contract.vramprofile import ProfileController, seconds
from headroom.core.recommend.programs import Family
from headroom.recorder.pod_facts import End
from tests.recorder.facts import pod_json, read


def test_facts_of_a_running_pod_are_kept() -> None:
    observed = read(pod_json())
    assert (observed.metadata.uid, observed.metadata.resource_version) == ("u1", "7")
    found = observed.facts
    assert (found.namespace, found.name, found.generate_name) == (
        *("team", "llm-5d4f-abcde"),
        "llm-5d4f-",
    )
    assert (found.controller.kind, found.controller.uid) == ("ReplicaSet", "rs-1")
    assert found.found_by == ProfileController(kind="ReplicaSet", name="llm")
    assert found.programs["main"].family is Family.VLLM
    assert (found.ends, found.disrupted, found.deleting) == ({}, False, False)
    assert found.node == "n1"


def test_variables_of_headroom_do_not_change_the_program() -> None:
    pod = pod_json()
    before = read(pod).facts.programs["main"].fingerprint
    env = pod["spec"]["containers"][0]["env"]
    env[1]["value"] = "6"
    assert read(pod).facts.programs["main"].fingerprint == before
    env[2]["valueFrom"]["secretKeyRef"]["name"] = "other"
    assert read(pod).facts.programs["main"].fingerprint != before


def test_a_pod_without_a_gpu_keeps_only_its_identity() -> None:
    pod = pod_json()
    pod["spec"]["containers"][0]["resources"] = {}
    observed = read(pod)
    assert observed.facts is None
    assert observed.metadata.uid == "u1"


def test_the_request_of_the_author_is_kept() -> None:
    def requests(**annotations: str) -> object:
        pod = pod_json()
        pod["metadata"]["annotations"] = {
            f"headroom.gpu/{key.replace('_', '-')}": value for key, value in annotations.items()
        }
        return read(pod).facts.requests

    assert requests(vram="12Gi") == {"main": Bytes(12 << 30)}
    assert requests(vram="50%") == {"main": Share(500_000)}
    # An amount from a recommendation, from the namespace's default or for a whole replica was not
    # written by an author.
    assert requests(vram="12Gi", vram_from="VRAMProfile llm-1") == {}
    assert requests(vram="12Gi", vram_from="namespace team") == {}
    assert requests() == {}
    assert requests(vram="much") == {}


@pytest.mark.parametrize("state", ["state", "lastState"])
def test_the_end_of_a_container_is_classified(state: str) -> None:
    terminated = {
        "exitCode": 137,
        "reason": "OOMKilled",
        "finishedAt": "2026-11-25T22:00:00Z",
    }
    status = {"name": "main", state: {"terminated": terminated}}
    observed = read(pod_json(status={"phase": "Running", "containerStatuses": [status]}))
    at_s = seconds("2026-11-25T22:00:00Z")
    assert at_s == 1795644000.0
    assert observed.facts.ends == {"main": End(137, "OOMKilled", at_s)}


def test_disruption_and_deletion_are_recognised() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    pod = pod_json(status={"conditions": [condition]})
    pod["metadata"]["deletionTimestamp"] = "2026-11-25T22:00:00Z"
    found = read(pod).facts
    assert (found.disrupted, found.deleting) == (True, True)
    condition["status"] = "False"
    assert not read(pod).facts.disrupted
