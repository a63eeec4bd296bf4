"""Calls a debug API in this process, without a network."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from extender.metrics import Telemetry
from extender.scheduler.journal_endpoint import JournalSource, journal_routes
from headroom.console.app import console_app
from headroom.console.feed.feed import Feed
from headroom.console.feed.journals import Followed, Journals
from headroom.console.shared_answers import SharedAnswers
from headroom.console.view_context import Context, no_quotas
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Journal
from headroom.core.placement.policy import Rules
from headroom.core.rules.pod_requests import ResourceQuota
from headroom.runtime.follow.journal_stream import HoldsLine, StateLine, holds_line
from headroom.runtime.server.auth import Guard
from tests.builders import DISTRIBUTED, GATE_IMAGE, gpunode, kube_node, shared

#: The time of the reports from ``tests.builders``, 2026-11-21T00:00:00Z.
WALL_S = 1_795_219_200.0
STALE_AFTER_S = 90.0
RULES = Rules(gate_image=GATE_IMAGE)
_NUMBERS = itertools.count()


@dataclass(slots=True)
class Asked:
    """A debug API with a test clock. ``now_s`` is the number of seconds since the reports, on every
    clock.
    """

    now_s: float = 0.0
    writer: ClusterWriter = field(
        default_factory=lambda: ClusterWriter(RULES, STALE_AFTER_S, epoch_s=WALL_S)
    )
    journal: Journal = field(default_factory=Journal)
    #: The other extenders, as their journals describe them.
    followed: list[Followed] = field(default_factory=list)
    feed: Feed = field(default_factory=Feed.over)
    guard: Guard | None = None
    #: Does not reuse answers, because a test changes the state and reads it again at the same clock
    #: time.
    answers: SharedAnswers = field(default_factory=lambda: SharedAnswers(0.0))
    quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas
    cluster: Cluster = field(init=False)
    context: Context = field(init=False)
    stream: JournalSource = field(init=False)
    app: FastAPI = field(init=False)

    def __post_init__(self) -> None:
        replica = f"replica-{next(_NUMBERS)}"
        self.cluster = self.writer.cluster
        self.context = Context(
            self.cluster,
            Journals(replica, self.journal, lambda: self.followed),
            Telemetry(CollectorRegistry()),
            lambda: "",
            lambda: self.now_s,
            lambda: WALL_S + self.now_s,
            replica,
            self.feed,
            guard=self.guard,
            quotas=self.quotas,
            scheduler="default-scheduler",
            answers=self.answers,
        )
        # A stream ends after its first lines, because ``answer`` reads all of it.
        self.stream = JournalSource(
            replica, self.journal, self._state_line, self._holds_line, ended=True
        )
        self.app = console_app(self.context, journal_routes(self.stream))

    def _state_line(self) -> StateLine:
        at_s, generation = WALL_S + self.now_s, self.cluster.generation
        return StateLine(self.context.replica, "unknown", at_s, generation, "", "enforce")

    def _holds_line(self) -> HoldsLine:
        return holds_line(self.cluster, self.now_s)

    def add_node(self, name: str) -> None:
        """Add a node with two shared GPUs, reported now."""
        devices = shared(f"GPU-{name}-0"), shared(f"GPU-{name}-1", 1)
        self.writer.apply(
            [
                NodeSeen(kube_node(name)),
                GPUNodeSeen(gpunode(*devices, name=name, plugin=DISTRIBUTED), self.now_s),
            ]
        )

    def get(
        self, path: str, headers: Mapping[str, str] = {}, method: str = "GET"
    ) -> httpx.Response:
        return answer(self.app, method, path, headers)

    def post(self, path: str, body: object) -> httpx.Response:
        return answer(self.app, "POST", path, body=body)


def answer(
    app: FastAPI, method: str, path: str, headers: Mapping[str, str] = {}, body: object = None
) -> httpx.Response:
    """Return the application's response. Raise any exception that the application raises."""

    async def asking() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://debug") as client:
            return await client.request(method, path, headers=dict(headers), json=body)

    return asyncio.run(asking())
