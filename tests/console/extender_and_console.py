"""Simulates an extender and a console that follows it but receives events later."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace

from headroom.console.feed.journal_follower import HoldsUpdater
from headroom.console.feed.journals import Followed
from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kube import Pod, PodStatus
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import BindBegun, BindEnded, Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Journal
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from headroom.runtime.follow.journal_stream import (
    Copy,
    Cursor,
    HoldsLine,
    encode,
    holds_line,
)
from tests.builders import NOW_S, gpunode, kube_node, shared
from tests.state.evictions import newcomer

EPOCH_S = 1_795_219_200.0 - NOW_S
NODES = ("n0", "n1")
PODS = tuple(f"p{number}" for number in range(4))
T = TypeVar("T", GPUNode, Pod)


def state() -> ClusterWriter:
    return ClusterWriter(Rules(nomination_hold_s=20.0), 90.0, EPOCH_S)


class Pair:
    """An extender and a console. The console reads the extender's stream and the API server with
    separate delays.
    """

    def __init__(self) -> None:
        self.extender, self.console = state(), state()
        self.coming = self.extender.parts.calls.assumed
        self.now_s = NOW_S
        self._versions = count(2)
        #: Events of the API server that the console has not received yet.
        self.unread: list[Event] = []
        self.gpunodes = {name: gpunode(shared(f"GPU-{name}"), name=name) for name in NODES}
        self.pods = {
            name: newcomer(8, priority=10 * (number % 2), name=name)
            for number, name in enumerate(PODS)
        }
        for name, gn in self.gpunodes.items():
            self.both([NodeSeen(kube_node(name)), GPUNodeSeen(gn, NOW_S)])
        self.both([PodSeen(each) for each in self.pods.values()])
        self.begun: dict[str, str] = {}
        #: All pods whose bind the extender has ever assumed.
        self.assumed: set[str] = set()
        self.gone: set[str] = set()
        self.copy = Copy(Journal())
        self.wire: list[bytes] = []
        self.connect()
        self.assuming = HoldsUpdater(lambda: [self.followed()], self.console.apply)

    def both(self, events: Sequence[Event]) -> None:
        """Deliver events to the extender immediately, and queue them for the console."""
        self.extender.apply(events)
        self.unread += events

    def followed(self) -> Followed:
        return Followed("x", self.copy.journal, None, 0.1, "", holds=self.copy.holds)

    def line(self) -> HoldsLine:
        return holds_line(self.extender.cluster, self.now_s)

    def expect(self, name: str, node: str) -> None:
        request = self.extender.cluster.understand(self.pods[name])
        assert isinstance(request, VramRequest)
        self.coming.assume(self.pods[name], request, node, self.now_s)
        self.assumed.add(name)

    def waits(self, name: str) -> bool:
        return name not in self.gone and not self.pods[name].node

    def begin(self, name: str, node: str) -> None:
        if name not in self.begun and self.waits(name):
            self.begun[name] = node
            self.coming.forget(name)
            self.extender.apply([BindBegun(self.pods[name], node)])

    def write(self, name: str) -> None:
        """Write the pod's reservation, and bind the pod to its node."""
        if (node := self.begun.get(name)) is None or not self.waits(name):
            return
        assumed = self.extender.cluster.holds.binding_to(node).get(name)
        if assumed is not None:
            self._reserve(node, {**self.gpunodes[node].spec.reservations, name: assumed})
            spec = replace(self.pods[name].spec, node_name=node)
            self._pod(name, replace(self.pods[name], spec=spec))

    def end(self, name: str) -> None:
        if node := self.begun.pop(name, ""):
            self.extender.apply([BindEnded(name, node)])

    def nominate(self, name: str, node: str) -> None:
        """Set the pod's nominated node. An empty name removes the nomination."""
        if self.waits(name):
            status = PodStatus(phase="Pending", nominated_node_name=node or None)
            self._pod(name, replace(self.pods[name], status=status))

    def foretell(self, name: str, node: str) -> None:
        """Record that kube-scheduler is about to nominate the pod."""
        if self.waits(name):
            self.extender.parts.calls.assumed.nominate(self.pods[name], node, self.now_s)

    def delete(self, name: str) -> None:
        self.gone.add(name)
        self.both([PodGone(name)])
        for node, each in self.gpunodes.items():
            left = {uid: r for uid, r in each.spec.reservations.items() if uid != name}
            if len(left) < len(each.spec.reservations):
                self._reserve(node, left)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.extender.cluster.holds.nominees(self.now_s)  # as every filter call does

    def _reserve(self, node: str, reservations: dict[str, Reservation]) -> None:
        spec = replace(self.gpunodes[node].spec, reservations=reservations)
        self.gpunodes[node] = self._next(replace(self.gpunodes[node], spec=spec))
        self.both([GPUNodeSeen(self.gpunodes[node], NOW_S)])

    def _pod(self, name: str, after: Pod) -> None:
        self.pods[name] = self._next(after)
        self.both([PodSeen(self.pods[name])])

    def _next(self, of: T) -> T:
        version = str(next(self._versions))
        return replace(of, metadata=replace(of.metadata, resource_version=version))

    def look(self) -> None:
        self.wire += [encode(line) for line in self.cursor.lines()]

    def read(self, twice: bool = False) -> None:
        if self.wire:
            line = self.wire.pop(0)
            for _ in range(1 + twice):
                self.copy.take(line)
        self.assume()

    def lose(self) -> None:
        """Drop the connection and its undelivered lines, and connect again."""
        self.wire.clear()
        self.connect()

    def connect(self) -> None:
        self.cursor = Cursor(Journal(), self.copy.version, self.line)

    def watch(self) -> None:
        if self.unread:
            self.console.apply([self.unread.pop(0)])

    def assume(self) -> None:
        asyncio.run(self.assuming.once())

    def catch_up(self) -> None:
        while self.unread:
            self.watch()
        self.look()
        while self.wire:
            self.read()


STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["expect", "begin", "nominate", "foretell"]),
        st.sampled_from(PODS),
        st.sampled_from(NODES),
    ),
    st.tuples(st.just("nominate"), st.sampled_from(PODS), st.just("")),
    st.tuples(st.sampled_from(["write", "end", "delete"]), st.sampled_from(PODS)),
    st.tuples(st.just("pass_s"), st.sampled_from([0.1, 3.0, 16.0, 30.0])),
    st.tuples(st.just("read"), st.booleans()),
    st.tuples(st.sampled_from(["look", "watch", "lose"])),
)
