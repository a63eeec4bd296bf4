"""Checks that commands never print text from tenants or agents as a shell command or a control
character.

The console shows pods, reports and profiles with hostile text, including old objects that today's
schemas reject.
"""

import contextlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families

from headroom.contract.gpunode import OveruseEviction
from headroom.contract.kube import OwnerReference, Pod
from headroom.contract.vramprofile import ProfileOwner
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen, ProfileSeen
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import Asked
from tests.console.test_recommendations import profile
from tests.contract.test_commands import unprintable
from tests.kubectl.transcripts import Shown, run

ESC = "\x1b]0;owned\x07\x1b[2J\x1b[31mFAILED\x1b[0m\x9b31m\x7f\u202egpj.exe\u200b\u2028"
NEW_LINE = "a\ntouch /tmp/headroom-pasted #"
SHELL = "web; touch /tmp/headroom-pasted; #"
TEXTS = ESC, NEW_LINE, SHELL, "$(touch /tmp/headroom-pasted)", "'; touch /tmp/headroom-pasted; '"
COMMANDS = (
    *("top", "top gpu", "top pod -A", "top pod -A -o wide", "top model", "capacity --vram 2Gi"),
    *("pending -A", "pending -A -o wide", "drift -A", "drift -A -o wide", "decisions -A", "log"),
    *("idle", "idle -o wide", "recommend -A", "recommend -A -o wide", "recommend -A -o patch"),
    *(
        "defaults -A",
        "quota -A",
        "defrag",
        "snapshot",
        "snapshot --redact",
        "costs",
        "costs -o csv",
        "idle -o csv",
        "recommend -A -o csv",
    ),
    *("why -n team large-0", "why -n team large-0 -o wide", "why -n team runs-0 -o wide"),
    *("score -n team large-0 --node gpu-a", "whatif --pods 2 --vram 9Gi", "top gpu --troubled"),
    *("why -n team large-0 -o json", "why -n team runs-1 -o yaml", "top pod -A -o json"),
)


class Direct:
    """A client that sends requests to an application in this process."""

    name, hint = "console", "hint"

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    @contextlib.contextmanager
    def open(self, method: str, target: str, body: bytes | None, headers: Any) -> Iterator[Any]:
        sent = json.loads(body) if body else None
        reply = self._asked.post(target, sent) if method == "POST" else self._asked.get(target)
        read = lambda _: reply.content  # noqa: E731
        yield SimpleNamespace(status=reply.status_code, read=read, headers=reply.headers)


def hostile(of: Pod, text: str) -> Pod:
    owner = OwnerReference(
        api_version="x.example/v1", kind="Deployment", name=text, uid="o", controller=True
    )
    notes = {**(of.metadata.annotations or {}), "headroom.gpu/note": text, text: text}
    metadata = msgspec.structs.replace(
        of.metadata, owner_references=[owner], annotations=notes, labels={"app": text}
    )
    return msgspec.structs.replace(of, metadata=metadata)


@pytest.fixture(scope="module")
def console() -> Asked:
    asked = Asked()
    gpus, rows, held, events = [], [], {}, []
    for number, text in enumerate(TEXTS):
        uuid = f"GPU-{number}{text}"
        health = {"healthy": False, "health_reason": text} if number % 2 == 0 else {}
        gpus.append(shared(uuid, 3, 1, index=number, model=f"L4 {text}", **health))
        idle = {"idle_since": "2026-11-20T00:00:00Z"}
        names = {"name": f"runs-{number}", "namespace": "team", "container": "main"}
        rows.append(use(f"r{number}", uuid, 9 * GIB, source=text, replica=text, **names, **idle))
        charged = reservation({uuid: 8 * GIB}, name=f"runs-{number}")
        over = OveruseEviction(device=uuid, since=text)
        held[f"r{number}"] = msgspec.structs.replace(charged, namespace="team", overuse=over)
        runs = pod(
            "8Gi",
            uid=f"r{number}",
            name=f"runs-{number}",
            namespace="team",
            node="gpu-a",
            phase="Running",
        )
        runs = msgspec.structs.replace(
            runs, status=msgspec.structs.replace(runs.status, phase="Running")
        )
        waits = pod("90Gi", uid=f"l{number}", name=f"large-{number}", namespace="team")
        odd = pod(text, uid=f"b{number}", name=f"bad-{number}", namespace="team")
        events += [PodSeen(hostile(each, text)) for each in (runs, waits, odd)]
        lives = profile(name=f"w{number}")
        owner = ProfileOwner(kind="Deployment", name=text, api_version=text)
        named = msgspec.structs.replace(lives.status, owner=owner)
        containers = [
            msgspec.structs.replace(each, container=text, model=text) for each in named.containers
        ]
        named = msgspec.structs.replace(named, containers=[*named.containers, *containers])
        lives = msgspec.structs.replace(lives, status=named)
        asked.context.profiles.apply([ProfileSeen(lives)])
    node = gpunode(*gpus, name="gpu-a", plugin=DISTRIBUTED, reservations=held, pods=rows)
    asked.writer.apply([NodeSeen(kube_node("gpu-a")), GPUNodeSeen(node, 0.0), *events])
    return asked


def shown(console: Asked, command: str, width: int | None = None) -> Shown:
    with mock.patch("headroom.kubectl.options.transport_for", return_value=Direct(console)):
        return run("http://console", *shlex.split(command), width=width)


@pytest.mark.parametrize("width", [None, 60])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_output_has_a_control_character(console: Asked, command: str, width: int | None) -> None:
    found = shown(console, command, width)
    assert found.returncode in (0, 1), found.stderr
    assert found.stdout or found.stderr
    assert unprintable(f"{found.stdout}{found.stderr}".replace("\n", "")) == []


def test_hostile_texts_are_shown(console: Asked) -> None:
    """Otherwise, the tests above would check nothing."""
    for command in ("top gpu --troubled", "recommend -A", "why -n team runs-0 -o wide"):
        assert "FAILED" in shown(console, command).stdout, command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_printed_command_executes_with_the_shown_words(console: Asked, command: str) -> None:
    for line in shown(console, command).stdout.splitlines():
        text = line.strip()
        if text.startswith("kubectl "):
            assert shlex.join(shlex.split(text)) == text


def test_the_script_of_patches_executes_only_kubectl(console: Asked, tmp_path: Any) -> None:
    script = shown(console, "recommend -A -o patch").stdout
    assert "kubectl -n ml patch deployment" in script
    calls = tmp_path / "calls"
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\nprintf "%s\\n" "$#" >> {calls}\n')
    (tmp_path / "kubectl").chmod(0o755)
    safe = script.replace("/tmp/headroom-pasted", str(tmp_path / "pasted"))
    done = subprocess.run(
        ["sh"],
        input=safe,
        text=True,
        capture_output=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "pasted").exists()
    assert set(calls.read_text().split()) == {"8"}


@pytest.mark.parametrize(
    "path", ["overview", "nodes", "pods", "pending", "recommendations", "snapshot", "map", "risks"]
)
def test_no_view_has_a_control_character(console: Asked, path: str) -> None:
    text = console.get(f"/v1/{path}").text
    assert unprintable(text.replace("\n", "")) == []


def test_metrics_have_no_control_characters() -> None:
    asked = Asked()
    registry = asked.context.telemetry.registry
    gauge = Gauge("headroom_odd", "Any.", ["model"], registry=registry)
    for text in TEXTS:
        gauge.labels(text).set(1)
    exposed = asked.get("/metrics").text
    assert "FAILED" in exposed
    assert unprintable(exposed.replace("\n", "")) == []
    assert len(list(text_string_to_metric_families(exposed))) > 1
