"""A console counts the assumed binds and nominations of the extenders that it follows."""

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from typing import TypeVar, cast

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from contract.gpunode import GPUNode, Reservation
from contract.kube import Pod, PodStatus
from extender.app.cluster_view import ClusterView
from extender.app.console import Console
from extender.app.extender import Extender
from extender.config.settings import Settings
from extender.ledger.bind import BindRequest, Failed
from extender.ledger.ledger import Ledger
from extender.observability.journal_follower import AssumedBindsUpdater, assumed_by
from extender.observability.journal_stream import (
    AssumedBind,
    AssumedLine,
    Copy,
    Cursor,
    Nomination,
    StateLine,
    assumed_line,
    encode,
)
from extender.observability.journals import Followed
from extender.observability.metrics import ViewTelemetry
from extender.placement.policy import Rules
from extender.placement.request import VramRequest
from extender.scheduler import assumed_binds
from extender.scheduler.assumed_binds import AssumedBinds
from extender.state.changes import (
    AssumedSeen,
    BindBegun,
    BindEnded,
    Event,
    GPUNodeSeen,
    NodeSeen,
    PodGone,
    PodSeen,
)
from extender.state.cluster_writer import ClusterWriter
from extender.state.journal import Journal
from extender.state.nominations import Place
from extender.state.pending_pods import Pending
from tests.builders import NOW_S, gpunode, kube_node, reservation, shared
from tests.console.test_journal_follower import extender as extender_at
from tests.examples import examples
from tests.serving import binding, offer
from tests.serving import pod as sent
from tests.state.evictions import newcomer
from tests.waiting import until_then

EXPIRES_S = 15.0
MAX_ASSUMED = 500

EPOCH_S = 1_795_219_200.0 - NOW_S
NODES = ("n0", "n1")
PODS = tuple(f"p{number}" for number in range(4))
T = TypeVar("T", GPUNode, Pod)


def state() -> ClusterWriter:
    return ClusterWriter(Rules(nomination_hold_s=20.0), 90.0, EPOCH_S)


class Pair:
    """An extender, and a console that reads its stream and the same API server, each late."""

    def __init__(self) -> None:
        self.extender, self.console = state(), state()
        self.coming = AssumedBinds(self.extender)
        self.now_s = NOW_S
        self._versions = count(2)
        #: Events of the API server that the console has not read yet.
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
        self.gone: set[str] = set()
        self.copy = Copy(Journal())
        self.wire: list[bytes] = []
        self.connect()
        self.assuming = AssumedBindsUpdater(lambda: [self.followed()], self.console.apply)

    def both(self, events: Sequence[Event]) -> None:
        """The extender sees them at once."""
        self.extender.apply(events)
        self.unread += events

    def followed(self) -> Followed:
        return Followed("x", self.copy.journal, None, 0.1, "", assumed=self.copy.assumed)

    def line(self) -> AssumedLine:
        return assumed_line(self.extender, self.coming.reservations(self.now_s), self.now_s)

    # Steps of the extender.

    def expect(self, name: str, node: str) -> None:
        request = self.extender.understand(self.pods[name])
        assert isinstance(request, VramRequest)
        self.coming.expect(self.pods[name], request, node, self.now_s)

    def waits(self, name: str) -> bool:
        return name not in self.gone and not self.pods[name].node

    def begin(self, name: str, node: str) -> None:
        if name not in self.begun and self.waits(name):
            self.begun[name] = node
            self.coming.bind_received(name)
            self.extender.apply([BindBegun(self.pods[name], node)])

    def write(self, name: str) -> None:
        """The reservation, and the pod on its node."""
        if (node := self.begun.get(name)) is None or not self.waits(name):
            return
        assumed = self.extender.binding_to(node).get(name)
        if assumed is not None:
            self._reserve(node, {**self.gpunodes[node].spec.reservations, name: assumed})
            spec = replace(self.pods[name].spec, node_name=node)
            self._pod(name, replace(self.pods[name], spec=spec))

    def end(self, name: str) -> None:
        if node := self.begun.pop(name, ""):
            self.extender.apply([BindEnded(name, node)])

    def nominate(self, name: str, node: str) -> None:
        """An empty node takes the nomination back."""
        if self.waits(name):
            status = PodStatus(phase="Pending", nominated_node_name=node or None)
            self._pod(name, replace(self.pods[name], status=status))

    def foretell(self, name: str, node: str) -> None:
        """kube-scheduler is going to nominate the pod."""
        if self.waits(name):
            self.extender.nominations.expect(self.pods[name], node, self.now_s)

    def delete(self, name: str) -> None:
        self.gone.add(name)
        self.both([PodGone(name)])
        for node, each in self.gpunodes.items():
            left = {uid: r for uid, r in each.spec.reservations.items() if uid != name}
            if len(left) < len(each.spec.reservations):
                self._reserve(node, left)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.extender.nominees(self.now_s)  # as every filter call asks

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

    # Steps of the console.

    def look(self) -> None:
        self.wire += [encode(line) for line in self.cursor.lines()]

    def read(self, twice: bool = False) -> None:
        if self.wire:
            line = self.wire.pop(0)
            for _ in range(1 + twice):
                self.copy.take(line)
        self.assume()

    def lose(self) -> None:
        """The connection, and what it had not delivered."""
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


def counted(state: ClusterWriter) -> dict[str, object]:
    """All that decides about room; who is charged first on a device does not."""
    return {
        terms.name: replace(
            terms,
            devices=tuple(
                replace(each, holders=tuple(sorted(each.holders, key=lambda holder: holder.uid)))
                for each in terms.devices
            ),
        )
        for terms in state.snapshot().nodes
    }


def left_to(state: ClusterWriter, of: Pod, now_s: float) -> dict[str, list[str]]:
    held = state.held_for(of, now_s)
    return {node: sorted(each.metadata.uid for each in pods) for node, pods in held.items()}


@hypothesis.settings(max_examples=examples(375))
@given(st.lists(STEPS, max_size=40))
def test_a_console_that_has_caught_up_counts_what_the_extender_counts(
    steps: list[tuple[str, ...]],
) -> None:
    pair = Pair()
    for name, *arguments in steps:
        getattr(pair, name)(*arguments)
    pair.catch_up()
    expected: dict[str, set[str]] = {}
    for uid, node, held in pair.coming.reservations(pair.now_s):
        if uid not in pair.extender.binding_to(node):
            expected.setdefault(node, set()).add(uid)
            assert pair.console.binding_to(node)[uid] == held
    for node in NODES:
        assumed = pair.console.binding_to(node)
        ours = {uid: each for uid, each in assumed.items() if uid not in expected.get(node, ())}
        assert ours == pair.extender.binding_to(node)
    for name in pair.pods:
        of = pair.pods[name]
        at_s = pair.now_s
        assert left_to(pair.console, of, at_s) == left_to(pair.extender, of, at_s)
    pair.pass_s(EXPIRES_S)  # of filter's room for binds that did not come
    pair.catch_up()
    assert counted(pair.console) == counted(pair.extender)


def followed(line: AssumedLine | None, heard_s: float | None = 0.1, gone: bool = False) -> Followed:
    return Followed("x", Journal(), None, heard_s, "", gone, line)


def line(*uids: str, node: str = "n0", held: bool = True) -> AssumedLine:
    binds = tuple(AssumedBind(uid, node, reservation({"GPU-0": 1}, name=uid)) for uid in uids)
    return AssumedLine(binds, tuple(Nomination(f"of-{uid}", node, held) for uid in uids))


def test_assumed_binds_of_several_extenders_are_added() -> None:
    seen = assumed_by([followed(line("a", "b")), followed(line("c", node="n1"))])
    assert {node: set(of) for node, of in seen.binds.items()} == {"n0": {"a", "b"}, "n1": {"c"}}
    assert seen.nominations is not None
    assert seen.nominations["of-c"] == Place("n1", held=True)
    both = [followed(line("a", held=False)), followed(line("a")), followed(line("a", held=False))]
    assert (assumed_by(both).nominations or {})["of-a"].held


def test_assumed_binds_of_a_silent_extender_expire_and_of_a_gone_one_end_at_once() -> None:
    assert assumed_by([followed(line("a"), EXPIRES_S - 0.1)]).binds
    nothing = AssumedSeen({}, None)
    assert assumed_by([followed(line("a"), EXPIRES_S)]) == nothing
    assert assumed_by([followed(line("a"), gone=True)]) == nothing
    assert assumed_by([followed(None)]) == nothing
    assert assumed_by([followed(AssumedLine())]) == AssumedSeen({}, {})


def test_without_any_extender_a_console_goes_by_the_nominations_that_it_sees() -> None:
    console = state()
    nominee = newcomer(8, name="nominee", nominated="n0")
    console.apply([NodeSeen(kube_node("n0")), PodSeen(nominee)])
    assert list(console.nominees(NOW_S)) == ["n0"]
    console.apply([AssumedSeen({}, {})])
    assert list(console.nominees(NOW_S)) == []
    console.apply([AssumedSeen({}, None)])
    assert list(console.nominees(NOW_S)) == ["n0"]


def test_an_extender_sends_no_more_than_the_most_and_places_that_are_held_first() -> None:
    extender = state()
    for number in range(MAX_ASSUMED + 10):
        name = f"p{number}"
        extender.nominations.pod_seen(newcomer(8, name=name, nominated="n0"), True)
    extender.nominees(NOW_S)
    extender.nominations.pod_seen(newcomer(8, name="late", nominated="n1"), True)
    sent_binds = (
        (f"c{number}", "n0", reservation({"GPU-0": 1})) for number in range(MAX_ASSUMED + 10)
    )
    sent = assumed_line(extender, sent_binds, NOW_S + 3600.0)
    assert (len(sent.binds), len(sent.nominations)) == (MAX_ASSUMED, MAX_ASSUMED)
    assert sent.nominations[0] == Nomination("late", "n1", held=True)
    copy = Copy(Journal())
    copy.take(encode(sent))
    assert copy.assumed == sent


def test_an_extender_streams_binds_that_are_expected_under_way_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assumed_binds, "BIND_FOLLOWS_WITHIN_S", 3600.0)

    async def play() -> tuple[list[tuple[str, str]], ...]:
        extender = Extender(Settings(), unready=lambda: "")
        for name in NODES:
            now = datetime.now(UTC).isoformat()
            node = gpunode(shared(f"GPU-{name}"), name=name, observed_at=now)
            extender.deliver([NodeSeen(kube_node(name)), GPUNodeSeen(node, time.monotonic())])
        started, goes_on = asyncio.Event(), asyncio.Event()

        class Slow:
            @property
            def binder(self) -> "Slow":
                return self

            async def bind(self, ask: BindRequest) -> Failed:
                started.set()
                await goes_on.wait()
                return Failed("the API server does not answer")

        verbs = extender.verbs(cast(Ledger, Slow()))
        shown = sent("p", "8Gi")
        message = [binds(extender)]
        verbs.filter(json.dumps(offer(shown, "n0")).encode())
        message.append(binds(extender))
        bind = asyncio.create_task(verbs.bind(json.dumps(binding(shown, "n0")).encode()))
        await started.wait()
        message.append(binds(extender))
        goes_on.set()
        await bind
        message.append(binds(extender))
        extender.loops.stop()
        return tuple(message)

    def binds(extender: Extender) -> list[tuple[str, str]]:
        return [(each.uid, each.node) for each in extender.assumed().binds]

    nothing: list[tuple[str, str]] = []
    there = [("uid-p", "n0")]
    assert asyncio.run(play()) == (nothing, there, there, nothing)


def test_a_console_counts_streamed_binds_and_an_extender_its_own() -> None:
    streamed = line("uid-p")
    opening = StateLine("other", "1.2.3", 0.0, 7, "", "enforce")

    def read(console: Console) -> list[AssumedLine | None]:
        return [each.assumed for each in console.following.now()]

    async def play(place: str) -> None:
        settings = Settings(extenders=[place])
        view = ClusterView(settings, lambda: "", ViewTelemetry(CollectorRegistry(), "ready"))
        extender = Extender(settings, unready=lambda: "")
        consoles = [
            Console(view, Pending),
            Console(extender, Pending, extender.journal),
        ]
        for of in (view, extender):
            of.deliver([NodeSeen(kube_node("n0"))])
        for console in consoles:
            console.start()
        try:
            await until_then(
                lambda: (
                    all(read(console) == [streamed] for console in consoles)
                    and set(view.cluster.binding_to("n0")) == {"uid-p"}
                ),
                "the console counts it",
            )
            names = [task.get_name() for task in asyncio.all_tasks()]
            assert names.count("assumed") == 1
        finally:
            view.loops.stop()
            extender.loops.stop()
            for console in consoles:
                await asyncio.to_thread(console.following.stop)

    with extender_at(encode(opening) + encode(streamed)) as (place, _):
        asyncio.run(play(place))
