"""Checks that a replay of a snapshot computes the same verdicts as this process for every pod and
node.
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from headroom.commands import app
from headroom.contract.annotations import DEFAULT_VRAM, DEVICE_CHOICE, MAX_SM, RESERVE, VRAM
from headroom.contract.gate import GATE
from headroom.contract.gpunode import EVICTED, Reservation
from headroom.contract.kube import (
    EnvVar,
    InitContainer,
    Node,
    NodeStatus,
    ObjectMeta,
    ResourceSlice,
    ResourceSliceSpec,
    SliceDevice,
)
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NamespaceSeen, NodeSeen, PodSeen, SliceSeen
from headroom.core.cluster.changes import ActivitySeen, BindBegun, Event, TimePassed
from headroom.core.journal.journal import Decision
from headroom.core.placement.device_reading import Activity
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    choosing,
    container,
    device,
    following,
    gate,
    gpunode,
    kube_node,
    mig,
    namespace,
    pod,
    reservation,
    shared,
    use,
)
from tests.console.asking import Asked
from tests.forks import run

HISTORY = "dcgm-history"

LATER = "2026-11-21T00:03:20+00:00"
SECRET = "hunter2"
SLICED = "nvidia.com/mig-1g.10gb"


def evicted(of: Reservation) -> Reservation:
    return msgspec.structs.replace(of, flags=[EVICTED])


def nodes() -> list[Event]:
    """Return the events of nodes that cover everything that can affect a verdict."""
    sits = [use("u-sits", "GPU-full-0", 20 * GIB, replica="GPU-full-0::0", name="sits")]
    full = shared("GPU-full-0", free=3, allocated=1, used_bytes=20 * GIB)
    made = {
        "full": gpunode(
            full, reservations={"u-sits": reservation({"GPU-full-0": 18 * GIB})}, pods=sits
        ),
        "two": gpunode(shared("GPU-two-0"), shared("GPU-two-1", free=2), plugin=DISTRIBUTED),
        "whole": gpunode(device("GPU-whole-0"), device("GPU-whole-1"), plugin=DISTRIBUTED),
        "sliced": gpunode(*(mig(f"MIG-{n}", n, resource=SLICED) for n in range(2))),
        "sick": gpunode(shared("GPU-sick", healthy=False, health_reason=f"XID of {SECRET}")),
        "foreign": gpunode(shared("GPU-foreign")),
        "hami": gpunode(shared("GPU-hami")),
        "sent-away": gpunode(shared("GPU-sent"), reservations={"u-e": evicted(reservation({}))}),
        "forgiven": gpunode(shared("GPU-given"), reservations={"u-f": evicted(reservation({}))}),
        "kept": gpunode(shared("GPU-kept"), plugin=DISTRIBUTED),
        "gates": gpunode(shared("GPU-gates"), plugin=DISTRIBUTED),
        "invalid": gpunode(shared("GPU-invalid"), plugin=DISTRIBUTED),
        "unset": gpunode(shared("GPU-unset"), initialised=False),
        "reserving": gpunode(shared("GPU-promising"), plugin=DISTRIBUTED),
        "crossed": gpunode(shared("GPU-crossed"), plugin=DISTRIBUTED),
        "silent": gpunode(),
    }
    annotations = {
        "kept": {RESERVE: "20Gi"},
        "gates": {DEVICE_CHOICE: "gated"},
        "invalid": {DEVICE_CHOICE: "any"},
        "hami": {"hami.io/node-handshake": "Requesting"},
    }
    gfd = {"count": "1", "replicas": "1", "memory": "24576", "product": "L4"}
    labelled = Node(
        ObjectMeta(name="labelled", labels={f"nvidia.com/gpu.{k}": v for k, v in gfd.items()}),
        status=NodeStatus(allocatable={GPU: "1"}),
    )
    events: list[Event] = [NodeSeen(labelled), GPUNodeSeen(gpunode(name="labelled"), 200.0)]
    for name, one in made.items():
        metadata = msgspec.structs.replace(one.metadata, name=name, uid=f"gn-{name}")
        status = one.status and msgspec.structs.replace(one.status, observed_at=LATER)
        whole = msgspec.structs.replace(one, metadata=metadata, status=status)
        seen_at_s = 130.0 if name == "forgiven" else 200.0
        events += [NodeSeen(kube_node(name, annotations.get(name))), GPUNodeSeen(whole, seen_at_s)]
    late = gpunode(shared("GPU-late"), name="late", plugin=DISTRIBUTED)
    events += [NodeSeen(kube_node("late")), GPUNodeSeen(late, 0.0)]
    return events


WAITING = {
    "small": pod("4Gi", uid="u-small", name="small"),
    "large": pod("22Gi", uid="u-large", name="large"),
    "share": pod("50%", uid="u-share", name="share"),
    "silent": pod(None, uid="u-silent", name="silent"),
    "sliced": pod("5Gi", container(resource=SLICED), uid="u-sliced", name="sliced"),
    "calm": pod(None, uid="u-calm", name="calm", annotations={VRAM: "1Gi", MAX_SM: "50%"}),
    "team": pod(None, container("main"), uid="u-team", name="team", namespace="team"),
    "named": pod("main=3Gi", uid="u-named", name="named"),
    "wrong": pod("a lot, really", uid="u-wrong", name="wrong"),
    "picks": pod("2Gi", choosing(container()), uid="u-picks", name="picks"),
    "held": pod("2Gi", init=[gate()], uid="u-held", name="held"),
    "forged": pod("2Gi", init=[InitContainer(name=GATE)], uid="u-forged", name="forged"),
    "follows": pod("2Gi", following(container()), uid="u-follows", name="follows"),
}


@pytest.fixture
def fleet() -> Asked:
    asked = Asked(now_s=200.0)
    foreign = ResourceSliceSpec("gpu.nvidia.com", "foreign", devices=[SliceDevice()])
    env = [EnvVar("TOKEN", SECRET), EnvVar("NVIDIA_VISIBLE_DEVICES", SECRET)]
    secretive = msgspec.structs.replace(container(), env=env)
    applied = {"kubectl.kubernetes.io/last-applied-configuration": f'"value":"{SECRET}"'}
    incoming = pod("20Gi", secretive, uid="u-coming", name="incoming", annotations=applied)
    asked.writer.apply(
        [
            NamespaceSeen(namespace("team", {DEFAULT_VRAM: "main=23Gi"})),
            *nodes(),
            SliceSeen(ResourceSlice(metadata=ObjectMeta(name="s"), spec=foreign)),
            PodSeen(pod("18Gi", uid="u-sits", name="sits", node="full", phase="Running")),
            PodSeen(pod("23Gi", uid="u-by", name="by", node="crossed", phase="Running")),
            *(PodSeen(each) for each in WAITING.values()),
            PodSeen(incoming),
            TimePassed(150.0),
            ActivitySeen(
                {("GPU-two-0", None): Activity(0.9, HISTORY, 0.99, 900.0, 150.0)}, ["two"]
            ),
            BindBegun(msgspec.structs.replace(incoming, spec=pod("20Gi").spec), "reserving"),
        ]
    )
    seen = WAITING["large"]
    asked.journal.record(
        Decision(seen, "u-large.1", 1_795_219_300.0, 3, 16, 0, {Reason.MEMORY_ON_ANY: 16})
    )
    return asked


def live(fleet: Asked, name: str) -> dict[str, str | None]:
    """Return the reason on each node that the view of the pod shows."""
    found: dict[str, str | None] = {}
    namespace_ = "team" if name == "team" else "default"
    for row in fleet.cluster.snapshot().nodes:
        answer = fleet.get(f"/v1/score?pod={namespace_}/{name}&node={row.name}")
        checks = answer.json()["live"]["failing"]
        found[row.name] = checks[0]["reason"] if checks else None
    return found


def replayed(file: Path, *options: str) -> list[dict[str, Any]]:
    ran = run("headroom", "replay", str(file), "--json", *options, env=os.environ)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def dumped(fleet: Asked, folder: Path, query: str = "") -> Path:
    answer = fleet.get(f"/v1/snapshot{query}")
    assert answer.status_code == 200, answer.text
    file = folder / "snapshot.json"
    file.write_bytes(answer.content)
    # Every pending pod gets a decision, so one replay covers all pods.
    body = json.loads(answer.content)
    body["decisions"] = [
        {**body["decisions"][0], "pod": each}
        for each in body["pods"]
        if "nodeName" not in each["spec"]
    ]
    file.write_text(json.dumps(body))
    return file


@pytest.mark.slow
def test_a_replay_gives_the_same_verdicts_for_every_pod_and_node(
    fleet: Asked, tmp_path: Path
) -> None:
    shown = {each["pod"]: each for each in replayed(dumped(fleet, tmp_path))}
    reasons: set[str | None] = set()
    for name in WAITING:
        if name == "wrong":
            assert "headroom.gpu/vram" in shown["default/wrong"]["lines"][0]
            continue
        key = f"team/{name}" if name == "team" else f"default/{name}"
        # A replay counts a started bind as a reservation.
        expected = {
            node: "memory_on_any" if reason == "held" else reason
            for node, reason in live(fleet, name).items()
        }
        assert shown[key]["verdicts"] == expected, name
        explained = fleet.get(f"/v1/explain?pod={key}").json()
        assert shown[key]["digest"] == explained["verdict_digest"]
        reasons |= set(expected.values())
        if name in ("held", "forged"):
            assert (expected["gates"] == Reason.NO_GATE.code) is (name == "forged")
    # Many different reasons occurred, so the fleet covers many kinds of nodes.
    assert len(reasons) >= 14, reasons


@pytest.mark.slow
def test_a_redacted_snapshot_gives_equal_verdicts_and_has_no_names(
    fleet: Asked, tmp_path: Path
) -> None:
    plain = replayed(dumped(fleet, tmp_path))
    hidden = dumped(fleet, tmp_path, "?redact=true")
    shown = replayed(hidden)
    # The digests are numbered in the order of the names.
    assert [(each["digest"], [*each["verdicts"].values()]) for each in shown] == [
        (each["digest"], [*each["verdicts"].values()]) for each in plain
    ]
    assert len({each["digest"] for each in shown}) > 5
    text = hidden.read_text()
    names = {terms.name for terms in fleet.cluster.snapshot().nodes} | set(WAITING)
    words = {
        word for word in json.dumps(json.loads(text)).replace('"', " ").replace("/", " ").split()
    }
    assert names.isdisjoint(words), names & words
    assert "GPU-" not in text
    assert "registry.example" not in text
    assert "u-" not in text.replace("gpu-", "")


def test_a_snapshot_has_no_values_of_environment_variables(fleet: Asked) -> None:
    for query in ("", "?redact=true"):
        text = fleet.get(f"/v1/snapshot{query}").text
        assert "TOKEN" not in text
        # An agent's message about a device may contain the UUID.
        assert SECRET not in text.replace(f"XID of {SECRET}", ""), query
    assert SECRET not in text


def test_equal_states_give_equal_bytes_except_for_the_head(fleet: Asked) -> None:
    def body() -> bytes:
        whole: bytes = fleet.get("/v1/snapshot").content
        return whole.partition(b'"settled"')[2]

    before = body()
    fleet.now_s += 1.0
    assert body() == before
    other = Asked(now_s=200.0)
    other.writer.apply(reversed([e for e in nodes() if isinstance(e, NodeSeen)]))
    again = Asked(now_s=200.0)
    again.writer.apply([e for e in nodes() if isinstance(e, NodeSeen)])
    one, two = (
        asked.get("/v1/snapshot").content.partition(b'"settled"')[2] for asked in (other, again)
    )
    assert one == two


def here(*arguments: str) -> Result:
    """Run the command line in this process."""
    # Keep the logging configuration. Otherwise, all later logs would go to the runner's file.
    with mock.patch("structlog.configure"):
        return CliRunner().invoke(app, ["replay", *arguments])


def test_replay_prints_one_pod_or_one_size(fleet: Asked, tmp_path: Path) -> None:
    file = str(dumped(fleet, tmp_path))
    one = here(file, "--pod", "default/small")
    assert one.stdout.startswith("default/small: fits on ")
    assert "  score " in one.stdout
    sized = json.loads(here(file, "--vram", "30Gi", "--json").stdout)
    assert sized["fits"] == 0
    shown = here(file, "--vram", "30Gi").stdout
    assert shown.startswith(f"default/asked: fits on 0 of 18 nodes; digest {sized['digest']}")
    absent = here(file, "--pod", "a/b")
    assert absent.exit_code == 2
    assert "pod a/b is not in the snapshot. The snapshot contains: default/" in absent.stderr


def test_replay_counts_one_node_in_the_singular(tmp_path: Path) -> None:
    lonely = Asked()
    lonely.add_node("n")
    reported = here(str(dumped(lonely, tmp_path)), "--vram", "1Gi").stdout
    assert reported.startswith("default/asked: fits on 1 of 1 node; digest ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "use the response of GET /v1/snapshot of the debug API"),
        ("{}", "Object missing required field `head`"),
    ],
)
def test_replay_rejects_a_file_that_is_not_a_snapshot(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "snapshot.json"
    file.write_text(text)
    rejected = here(str(file))
    assert rejected.exit_code == 2
    assert message in rejected.stderr
