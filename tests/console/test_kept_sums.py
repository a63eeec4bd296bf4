"""Checks that incrementally updated sums equal recomputed sums."""

import random
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from headroom.console.facts.gpu_pods import GpuPods
from headroom.console.history.history import History
from headroom.console.history.recorder import HistoryRecorder
from headroom.console.views.fleet import ModelSums
from headroom.console.views.teams import TeamSums
from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import Lease, ObjectMeta
from headroom.contract.watched import (
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
)
from headroom.core.cluster.changes import Event
from headroom.core.placement.updated_nodes import UpdatedNodes
from tests.builders import GIB, gpunode, kube_node, reservation, shared, use
from tests.console.asking import Asked
from tests.console.test_teams import owned

NODES, PODS = [f"n{number}" for number in range(4)], range(14)
MODELS = ("L4", "H100")


def node_of(pod: int) -> str | None:
    """Return the node of a pod, or None for the last two pods, which are pending."""
    return NODES[pod % len(NODES)] if pod < len(PODS) - 2 else None


class Changes:
    """Random changes of nodes, reports, heartbeats and pods."""

    def __init__(self, seed: int, asked: Asked) -> None:
        self._draw, self._asked, self._version = random.Random(seed), asked, 1

    def next(self) -> list[Event]:
        self._version += 1
        self._asked.now_s += self._draw.choice((0, 1, 40))
        node, pod = self._draw.choice(NODES), self._draw.choice(PODS)
        on = node_of(pod)
        kinds: dict[str, list[Event]] = {
            "node": [NodeSeen(kube_node(node))],
            "node gone": [NodeGone(node), GPUNodeGone(node)],
            "report": [GPUNodeSeen(self._report(node), self._asked.now_s)],
            "heartbeat": [HeartbeatSeen(self.lease(node), self._asked.now_s)],
            "pod": [PodSeen(owned(f"p{pod}", f"team-{pod % 2}", f"o{pod % 3}", on))],
            "pod gone": [PodGone(f"u-p{pod}", ended=True)],
        }
        return self._draw.choices(list(kinds.values()), [3, 1, 8, 4, 6, 2])[0]

    def _report(self, node: str) -> GPUNode:
        uuids = [f"GPU-{node}-{index}" for index in range(self._draw.randrange(1, 4))]
        pods = [pod for pod in PODS if node_of(pod) == node and self._draw.random() < 0.7]
        held = {f"u-p{pod}": self._draw.choice(uuids) for pod in pods}
        devices = [
            shared(
                uuid,
                index=index,
                model=self._draw.choice(MODELS),
                used_bytes=self._draw.randrange(24) * GIB,
                healthy=self._draw.random() < 0.8,
            )
            for index, uuid in enumerate(uuids)
        ]
        return gpunode(
            *devices,
            name=node,
            version=str(self._version),
            observed_at=self._stamp(),
            reservations={uid: self._reservation(uid, uuid) for uid, uuid in held.items()},
            pods=[
                use(uid, uuid, self._draw.choice((None, 2 * GIB, 9 * GIB)), name=uid[2:])
                for uid, uuid in held.items()
                if self._draw.random() < 0.7
            ],
        )

    def _reservation(self, uid: str, uuid: str) -> Reservation:
        found = reservation({uuid: self._draw.randrange(1, 9) * GIB}, name=uid[2:])
        return replace(found, namespace=f"team-{int(uid[3:]) % 2}")

    def lease(self, node: str) -> Lease:
        held = self._asked.cluster.gpunode(node)
        observed_at = held.status.observed_at if held and held.status else ""
        vouch = Confirmation(sampled_at=self._stamp(), gpunode="gn", observed_at=observed_at)
        annotations = {OBSERVED_AT: encode_confirmation(vouch)}
        return Lease(metadata=ObjectMeta(name=node, annotations=annotations))

    def _stamp(self) -> str:
        return f"2026-11-21T00:{self._version // 60:02d}:{self._version % 60:02d}+00:00"


def states(seed: int) -> Iterator[Asked]:
    """Yield the cluster after each of 120 random changes."""
    asked = Asked()
    changes = Changes(seed, asked)
    for _ in range(120):
        asked.writer.apply(changes.next())
        yield asked


@pytest.mark.parametrize("seed", range(6))
def test_totals_by_model_equal_recomputed_totals(seed: int) -> None:
    kept, largest = ModelSums(), 0
    for asked in states(seed):
        cluster, now_s = asked.cluster, asked.now_s
        snap = cluster.snapshot()
        found = kept.of(cluster, snap, now_s)
        assert found == ModelSums().of(cluster, snap, now_s)
        assert sum(each.devices for each in found) == sum(len(each.devices) for each in snap.nodes)
        largest = max(largest, len(found))
    assert largest == len(MODELS)


@pytest.mark.parametrize("seed", range(6))
def test_sums_of_teams_equal_recomputed_sums(seed: int) -> None:
    kept, rows, largest = TeamSums(), GpuPods(), 0
    for asked in states(seed):
        cluster = asked.cluster
        snap = cluster.snapshot()
        kept.update(cluster, snap, rows)
        scratch, all_rows = TeamSums(), GpuPods()
        scratch.update(cluster, snap, all_rows)
        assert kept.of("") == scratch.of("")
        assert kept.namespaces.totals == scratch.namespaces.totals
        listed = len(list(all_rows.of(cluster, snap)))
        assert listed == sum(
            pods + waiting for pods, waiting, *_ in kept.namespaces.totals.values()
        )
        largest = max(largest, listed)
    assert largest >= len(PODS) // 2


@pytest.mark.parametrize("seed", range(6))
def test_recorded_sums_equal_recomputed_sums(seed: int) -> None:
    kept: HistoryRecorder | None = None
    largest = 0
    for asked in states(seed):
        kept = kept or HistoryRecorder(asked.cluster, History(), asked.context.wall_s)
        scratch = HistoryRecorder(asked.cluster, History(), asked.context.wall_s)
        for recorder in (kept, scratch):
            for _ in recorder.record(asked.now_s):
                pass
        if totals := scratch.history.totals():
            assert kept.history.totals()[-1:] == totals
        assert kept.held == scratch.held
        largest = max(largest, len(kept.held))
    assert largest == 2


@pytest.mark.parametrize("seed", range(6))
def test_each_change_of_a_node_counts_as_an_update(seed: int) -> None:
    updated, known, unchanged = UpdatedNodes(), dict[str, tuple[object, ...]](), 0
    for asked in states(seed):
        cluster = asked.cluster
        generation = cluster.generation
        snap = cluster.snapshot()
        assert snap.generation == generation == cluster.generation
        rows = list(updated.since_last(snap, asked.now_s))
        for row, node in enumerate(snap.nodes):
            fresh = node.fresh_until_s >= asked.now_s
            now = (
                node.devices,
                cluster.gpunode(node.name),
                cluster.pods_on(node.name),
                fresh,
            )
            before = known.get(node.name, ())
            if not before or any(a is not b for a, b in zip(before, now, strict=True)):
                assert row in rows
            unchanged += row not in rows
            known[node.name] = now
        known = {name: known[name] for name in snap.names}
        assert list(updated.since_last(snap, asked.now_s)) == []
    assert unchanged > 100


def test_an_unfinished_round_is_repeated() -> None:
    asked = Asked()
    asked.add_node("n0")
    asked.add_node("n1")
    updated, snap = UpdatedNodes(), asked.cluster.snapshot()
    assert next(updated.since_last(snap)) == 0
    assert list(updated.since_last(snap)) == [0, 1]


def test_sums_are_correct_again_after_an_older_snapshot() -> None:
    asked = Asked()
    asked.add_node("n0")
    before = asked.cluster.snapshot()
    asked.add_node("n1")
    asked.writer.apply([PodSeen(owned(f"p{each}", "ml", "o", f"n{each}")) for each in range(2)])
    after = asked.cluster.snapshot()
    models, teams, rows = ModelSums(), TeamSums(), GpuPods()
    found = models.of(asked.cluster, after, asked.now_s)
    teams.update(asked.cluster, after, rows)
    assert models.of(asked.cluster, before, asked.now_s) != found
    teams.update(asked.cluster, before, rows)
    assert models.of(asked.cluster, after, asked.now_s) == found
    teams.update(asked.cluster, after, rows)
    assert sum(pods for pods, *_ in teams.namespaces.totals.values()) == 2


def test_a_heartbeat_keeps_the_rows_of_its_node() -> None:
    asked = Asked()
    asked.add_node("n0")
    rows = GpuPods()
    before = dict(rows.by_node(asked.cluster, asked.cluster.snapshot()))["n0"]
    asked.writer.apply([HeartbeatSeen(Changes(0, asked).lease("n0"), 10.0)])
    after = dict(rows.by_node(asked.cluster, asked.cluster.snapshot()))["n0"]
    assert after is before
