"""Tests minimal inputs for the bugs that hostile inputs have found."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent import gate_client
from agent.probes.dcgm_exposition import Exposition
from agent.probes.device_health import HealthState
from agent.probes.node_probe import of_labels
from agent.probes.state_file import StateFile
from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.contract.reasons import Reason
from headroom.convert.manifests import BadManifest, Options, convert
from headroom.core.cluster.label_inventory import believed
from headroom.core.placement.policy import Rules
from headroom.errors import BadSettings
from headroom.runtime.settings.loading import load_settings
from tests.fuzz.verbs import ForgedTarget
from tests.fuzz.world import NODES, Attacked
from tests.serving import binding, offer
from tests.serving import pod as sent_pod

DEEP = b"[" * 3000
LONG = "9" * 5000


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(sent_pod("half", "1Mi"), id="less"),
        pytest.param(sent_pod("half", None, gpus=0), id="no GPU at all"),
        pytest.param(sent_pod("half", "1Mi", version="2"), id="another version"),
    ],
)
def test_the_reservation_uses_the_request_of_the_pod_in_the_cluster(shown: object) -> None:
    assert ForgedTarget().take(json.dumps({**offer(None, *NODES[:4]), "Pod": shown}).encode())


def test_a_bind_requires_the_exact_names_of_the_pod() -> None:
    world = Attacked()
    asked = binding(sent_pod("half"), NODES[1]) | {"PodName": "small"}
    reply = world.call("bind", json.dumps(asked).encode())
    assert "pod default/small is not the pod of uid uid-half" in json.loads(reply.body)["Error"]
    world.unharmed()


@pytest.mark.parametrize(
    "line",
    [
        f'{{UUID="GPU-x"}} {"9" * 400}',
        f'{{UUID="GPU-x"}} 1 {"9" * 400}',  # The timestamp is infinite.
        f'{{UUID="x",GPU_I_ID="{LONG}"}} 1',
    ],
)
def test_an_infinite_value_of_the_exporter_hides_no_other_value(line: str) -> None:
    name = "DCGM_FI_PROF_SM_ACTIVE"
    exposition = Exposition()
    exposition.feed(f'{name}{line}\n{name}{{UUID="GPU-y"}} 1\n'.encode())
    scraped = exposition.end()
    assert ([each.uuid for each in scraped.readings], scraped.bad_lines) == (["GPU-y"], 1)


@pytest.mark.parametrize("count", [LONG, "٣"])
def test_a_label_with_a_very_long_number_is_not_a_number(count: str) -> None:
    labels = {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/gpu.replicas": count}
    reading = of_labels(labels)
    assert reading is not None
    assert reading.replicas == {}
    gke = {"cloud.google.com/gke-accelerator": f"tesla-{LONG}gb"}
    node = Node(
        metadata=ObjectMeta(name="n", labels=gke),
        status=NodeStatus(allocatable={"nvidia.com/gpu": "1"}),
    )
    assert believed(node, Rules()) is None


def test_a_too_deeply_nested_state_is_discarded(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b'{"x":' + DEEP)
    state = StateFile(path, HealthState(), "XIDs")
    state.read()
    assert "cannot be read" in state.trouble


def test_too_deeply_nested_settings_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"resources: " + b"[" * 900 + b"]" * 900)
    with pytest.raises(BadSettings, match=r"settings.yaml: is not YAML"):
        load_settings(path)


def test_settings_of_several_megabytes_are_rejected(tmp_path: Path) -> None:
    """A single string of 4 MB took seconds to parse."""
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"policy: " + b"pack\n " * (1 << 18))
    with pytest.raises(BadSettings, match=r"settings.yaml: is larger than 64 KiB"):
        load_settings(path)


def test_a_too_deeply_nested_manifest_is_rejected() -> None:
    with pytest.raises(BadManifest, match="nested more than 200"):
        convert('{"a":' * 3000, Options(1 << 30, None))


def test_a_reason_of_the_gate_is_a_single_printable_line() -> None:
    question = gate_client.Question("u", "127.0.0.1", 9410)
    answer = gate_client._read(503, b'{"answer":"not yet","reason":"\\ud800 a\\r\\nb"}', question)
    assert answer.text == "waiting: ? a b"
    assert answer.text.isascii()


@pytest.mark.parametrize("amount", [1 << 64, -(1 << 70)])
def test_a_number_beyond_64_bits_is_rejected_with_its_position(amount: int) -> None:
    world = Attacked()
    pods = [sent_pod("large", "8Gi") for _ in range(3)]
    pods[0]["spec"]["priority"] = amount
    pods[1]["spec"]["containers"][0]["ports"] = [{"hostPort": amount}]
    pods[2]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = amount
    places = "priority", "containers[0].ports[0].hostPort", "containers[0].resources.limits"
    for pod, place in zip(pods, places, strict=True):
        reply = world.call("filter", json.dumps(offer(pod, *NODES)).encode())
        assert f"$.Pod.spec.{place}" in json.loads(reply.body)["Error"]
    world.unharmed()


def _many(vram: str) -> dict[str, Any]:
    """Return a pod with 10,000 containers."""
    pod = sent_pod("many", vram)
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    pod["spec"]["containers"] = [{"name": f"c{i}", "resources": limits} for i in range(10_000)]
    return pod


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        pytest.param(_many("1Gi"), Reason.POD_TOO_LARGE.sentence, id="10,000 containers"),
        pytest.param(
            _many(",".join(f"c{i}=1Mi" for i in range(10_000))),
            Reason.POD_TOO_LARGE.sentence,
            id="10,000 containers, each by its name",
        ),
        *(
            pytest.param(sent_pod("long", text * (kib * 1024 // len(text))), why, id=f"{kib} {id}")
            for text, id in [("9", "KiB of digits"), (",", "of commas"), ("a=1Gi,", "of pairs")]
            for kib, why in [(31, "(example: 8Gi)"), (256, Reason.POD_TOO_LARGE.sentence)]
        ),
    ],
)
def test_large_input_is_rejected_with_a_short_message(shown: dict[str, Any], why: str) -> None:
    world = Attacked()
    reply = world.call("filter", json.dumps(offer(shown, *NODES)).encode())
    answer = json.loads(reply.body)
    assert answer["NodeNames"] == []
    assert why in answer["FailedAndUnresolvableNodes"][NODES[0]]
    assert len(reply.body) < 1000
    reply = world.call("prioritize", json.dumps(offer(shown, *NODES)).encode())
    assert json.loads(reply.body) == []
    world.unharmed()
