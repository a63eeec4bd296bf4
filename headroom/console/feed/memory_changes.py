"""Publishes when overuse and overcommitment begin and end."""

import asyncio
from collections.abc import Mapping

from headroom.console.feed.feed import CHECK_EVERY_S, EventKind, Feed
from headroom.contract.quantity import gib
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.crowded_pods import crowding_of_device
from headroom.core.overuse.tracker import OvercommittedSpan, Overuse
from headroom.core.overuse.victims import moment
from headroom.runtime.loops import Loops
from headroom.runtime.server.auth import everything


class MemoryChanges:
    """Compares the overuse of pods and the overcommitted devices with the last check."""

    def __init__(self, cluster: Cluster, feed: Feed) -> None:
        self._cluster = cluster
        self._feed = feed
        self._overuses: Mapping[tuple[str, str], Overuse] = {}
        self._spans: Mapping[tuple[str, str], OvercommittedSpan] = {}

    def start(self, loops: Loops, begun: asyncio.Event) -> None:
        """Start the loop. It publishes nothing until ``begun`` is set."""

        async def check() -> None:
            if begun.is_set():
                self.check()

        loops.start("memory_changes", check, CHECK_EVERY_S)

    def check(self) -> None:
        """Publish what began or ended since the last check."""
        self._check_spans()
        self._check_overuse()

    def _check_spans(self) -> None:
        before, now = self._spans, self._cluster.overcommits.spans
        if now is before:
            return
        self._spans = now
        for key, span in now.items():
            was = before.get(key)
            was_open, is_open = was is not None and was.ended_s is None, span.ended_s is None
            if was_open and is_open and was is not None and was.began_s != span.began_s:
                # Other pods or processes are the cause now.
                self._publish_span(span.earlier[0] if span.earlier else was)
            elif was_open == is_open:
                continue
            self._publish_span(span)

    def _publish_span(self, span: OvercommittedSpan) -> None:
        crowding = crowding_of_device(self._cluster, span)
        largest = next(iter(crowding.over.takers), None)
        self._feed.publish(
            "overcommit_began" if crowding.is_present else "overcommit_ended",
            node=crowding.over.node,
            device=crowding.over.device,
            namespace=largest.namespace if largest else "",
            name=largest.name if largest else "",
            message=crowding.sentence(everything),
        )

    def _check_overuse(self) -> None:
        before = self._overuses
        now = {each.key: each for each in self._cluster.overuses.lasting}
        self._overuses = now
        for key in now.keys() - before.keys():
            since_s = self._cluster.overuses.since_s(now[key])
            since = f" since {moment(self._cluster.epoch_s + since_s)}" if since_s else ""
            self._publish("overuse_began", now[key], f"uses {_amounts(now[key])}{since}")
        for key in before.keys() - now.keys():
            self._publish("overuse_ended", before[key], f"used {_amounts(before[key])}")

    def _publish(self, kind: EventKind, over: Overuse, message: str) -> None:
        self._feed.publish(
            kind,
            node=over.node,
            device=over.device,
            namespace=over.namespace,
            name=over.name,
            uid=over.uid,
            message=message,
        )


def _amounts(over: Overuse) -> str:
    used, excess = gib(over.measured_bytes, up=True), gib(over.excess_bytes, up=True)
    return f"{used}, {excess} more than it reserved"
