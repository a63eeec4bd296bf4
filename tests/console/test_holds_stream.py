"""Checks that a console counts the memory held by the extenders that it follows."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from extender.extender import Extender
from extender.ledger.bind_call import BindRequest, Failed
from extender.ledger.ledger import Ledger
from headroom.console.console import Console
from headroom.console.feed.journal_follower import holds_of
from headroom.console.feed.journals import Followed
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster import assumed_binds
from headroom.core.cluster.changes import BindBegun, HoldsSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.holds import HeldFor, Why
from headroom.core.journal.journal import Journal
from headroom.core.whatif.pending_pods import Pending
from headroom.runtime.follow.cluster_view import ClusterView
from headroom.runtime.follow.journal_stream import (
    Copy,
    HoldsLine,
    StateLine,
    encode,
    holds_line,
)
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import ViewTelemetry
from tests.builders import NOW_S, gpunode, kube_node, reservation, shared
from tests.console.extender_and_console import NODES, STEPS, Pair, state
from tests.console.test_journal_follower import extender as extender_at
from tests.examples import examples
from tests.serving import binding, offer
from tests.serving import pod as sent
from tests.state.evictions import newcomer
from tests.waiting import until_then

EXPIRES_S = 15.0
MAX_HOLDS = 1_000


def counted(state: ClusterWriter) -> dict[str, object]:
    """Return everything that affects free memory, but ignore the order of reservations on a
    device.
    """
    return {
        terms.name: replace(
            terms,
            devices=tuple(
                replace(each, holders=tuple(sorted(each.holders, key=lambda holder: holder.uid)))
                for each in terms.devices
            ),
        )
        for terms in state.cluster.snapshot().nodes
    }


def nominees(pair: Pair) -> Mapping[str, Sequence[Pod]]:
    return pair.extender.cluster.holds.nominees(pair.now_s)


def left_to(state: ClusterWriter, of: Pod, now_s: float) -> dict[str, list[str]]:
    held = state.cluster.holds.nominees_before(of, now_s)
    return {node: sorted(each.metadata.uid for each in pods) for node, pods in held.items()}


@hypothesis.settings(max_examples=examples(375))
@given(st.lists(STEPS, max_size=40))
def test_a_console_that_has_caught_up_counts_the_same_holds_as_the_extender(
    steps: list[tuple[str, ...]],
) -> None:
    pair = Pair()
    for name, *arguments in steps:
        getattr(pair, name)(*arguments)
    pair.catch_up()
    expected = {node: dict(of) for node, of in pair.extender.cluster.holds.all_binding().items()}
    nominated = {pod.metadata.uid for pods in nominees(pair).values() for pod in pods}
    for node, held_on in pair.extender.cluster.holds.against(None, pair.now_s).items():
        cached = pair.extender.cluster.gpunode(node)
        assert cached is not None
        for held in held_on:
            if (uid := held.pod.metadata.uid) in pair.assumed and held.kind is not None:
                reservation = pair.extender.cluster.adopt(held.pod, cached)
                assert reservation is not None
                expected.setdefault(node, {}).setdefault(uid, reservation)
            else:
                assert uid in nominated
    assert pair.console.cluster.holds.all_binding() == expected
    for name in pair.pods:
        of = pair.pods[name]
        at_s = pair.now_s
        assert left_to(pair.console, of, at_s) == left_to(pair.extender, of, at_s)
    pair.pass_s(
        EXPIRES_S
    )  # The memory that filter held for binds that did not follow is free again.
    pair.catch_up()
    assert counted(pair.console) == counted(pair.extender)


def followed(line: HoldsLine | None, heard_s: float | None = 0.1, gone: bool = False) -> Followed:
    return Followed("x", Journal(), None, heard_s, "", gone, line)


def line(*uids: str, node: str = "n0", held: bool = True) -> HoldsLine:
    made = reservation({"GPU-0": 1})
    assumed = [HeldFor(uid, node, Why.ASSUMED, made) for uid in uids]
    nominees = [HeldFor(f"of-{uid}", node, Why.NOMINATED, None, held) for uid in uids]
    return HoldsLine((*assumed, *nominees))


def test_assumed_binds_of_several_extenders_are_added() -> None:
    console = state()
    console.apply([holds_of([followed(line("a", "b")), followed(line("c", node="n1"))])])
    seen = console.cluster.holds.all_binding()
    assert {node: set(of) for node, of in seen.items()} == {"n0": {"a", "b"}, "n1": {"c"}}
    assert console.cluster.holds.node_of("of-c") == "n1"
    both = [followed(line("a", held=False)), followed(line("a")), followed(line("a", held=False))]
    console.apply([holds_of(both)])
    assert [each.holds for each in console.cluster.holds.all(NOW_S) if each.uid == "of-a"] == [True]


def test_assumed_binds_expire_if_the_extender_is_silent_and_end_at_once_if_it_is_deleted() -> None:
    assert holds_of([followed(line("a"), EXPIRES_S - 0.1)]).holds
    nothing = HoldsSeen(None)
    assert holds_of([followed(line("a"), EXPIRES_S)]) == nothing
    assert holds_of([followed(line("a"), gone=True)]) == nothing
    assert holds_of([followed(None)]) == nothing
    assert holds_of([followed(HoldsLine())]) == HoldsSeen(())


def test_without_an_extender_a_console_counts_the_nominations_in_the_api_server() -> None:
    console = state()
    nominee = newcomer(8, name="nominee", nominated="n0")
    console.apply([NodeSeen(kube_node("n0")), PodSeen(nominee)])
    assert list(console.cluster.holds.nominees(NOW_S)) == ["n0"]
    console.apply([HoldsSeen(())])
    assert list(console.cluster.holds.nominees(NOW_S)) == []
    console.apply([HoldsSeen(None)])
    assert list(console.cluster.holds.nominees(NOW_S)) == ["n0"]


def test_an_extender_sends_a_limited_number_of_holds_and_begun_binds_first() -> None:
    extender = state()
    for number in range(MAX_HOLDS + 10):
        extender.apply([PodSeen(newcomer(8, name=f"p{number}", nominated="n0"))])
    extender.cluster.holds.nominees(NOW_S)
    extender.apply([PodSeen(newcomer(8, name="late", nominated="n1"))])
    extender.apply([NodeSeen(kube_node("n0")), GPUNodeSeen(gpunode(shared(), name="n0"), NOW_S)])
    for number in range(10):
        extender.apply([BindBegun(newcomer(0, name=f"c{number}"), "n0")])
    sent = holds_line(extender.cluster, NOW_S + 3600.0)
    assert len(sent.holds) == MAX_HOLDS
    assert {each.why for each in sent.holds[:10]} == {Why.BINDING}
    assert sent.holds[10] == HeldFor("late", "n1", Why.NOMINATED)
    assert not any(each.holds for each in sent.holds[11:])
    copy = Copy(Journal())
    copy.take(encode(sent))
    assert copy.holds == sent


def test_an_extender_streams_expected_started_and_ended_binds(
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
        return [(each.uid, each.node) for each in extender.stream.holds().holds]

    nothing: list[tuple[str, str]] = []
    there = [("uid-p", "n0")]
    assert asyncio.run(play()) == (nothing, there, there, nothing)


def test_a_console_counts_streamed_binds_and_an_extender_counts_its_own() -> None:
    streamed = line("uid-p")
    opening = StateLine("other", "1.2.3", 0.0, 7, "", "enforce")

    def read(console: Console) -> list[HoldsLine | None]:
        return [each.holds for each in console.following.now()]

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
                    and set(view.cluster.holds.binding_to("n0")) == {"uid-p"}
                ),
                "the console counts it",
            )
            names = [task.get_name() for task in asyncio.all_tasks()]
            assert names.count("holds") == 1
        finally:
            view.loops.stop()
            extender.loops.stop()
            for console in consoles:
                await asyncio.to_thread(console.following.stop)

    with extender_at(encode(opening) + encode(streamed)) as (place, _):
        asyncio.run(play(place))
