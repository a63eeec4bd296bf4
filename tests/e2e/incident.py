"""Plays an incident at 3 a.m., and gets the answer of `kubectl headroom` to each question of the
operator.

The incident runs on real nodes. The fleet fills until every GPU has some free memory but no GPU has
enough, an unattributed process uses memory, and an agent stops. The expected answers follow from
these actions and not from Headroom's code.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from headroom.contract.gpunode import Device
from tests.controlplane import ROOT
from tests.driver import GIB
from tests.e2e.cluster import NAMESPACE
from tests.e2e.real import GPU_BYTES, RealCluster, is_refused
from tests.loopback import LOOPBACK

STRANGER_PID, STRANGER_GIB = 99_998, 7
#: Memory used on every GPU, in GiB. It leaves 8 GiB free.
FILLS_GIB = 16
WAITS_GIB = 20
#: The agents of this test send a heartbeat every 10 s, but a busy machine delays heartbeats.
STALE_AFTER_S = 45
#: Speed at which most people read a text with figures.
WORDS_A_SECOND = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    question: str
    command: str
    text: str
    #: Strings that the answer must contain.
    truth: tuple[str, ...]

    @property
    def reading_s(self) -> float:
        return len(self.text.split()) / WORDS_A_SECOND


def incident(cluster: RealCluster) -> Iterator[Answer]:
    """Play the incident on an empty cluster. At its end, the agent on the last node is stopped."""
    cluster.kill("extender")
    cluster.start_extender(settings={"stale_after_s": STALE_AFTER_S})
    cluster.until(cluster.initialised, "an extender that has all nodes")
    gpus = [gpu.uuid for machine in cluster.machines.values() for gpu in machine.driver.gpus]
    fills = [f"fills-{number}" for number in range(len(gpus))]
    for name in fills:
        cluster.ask(name, FILLS_GIB)
    cluster.until(lambda: len(cluster.bound()) == len(fills), "a pod on every GPU")
    cluster.until(cluster.decided, "all of them run")
    cluster.until(
        lambda: "unconfirmed" not in kubectl(cluster, "top pod -A"),
        "the console shows the GPU of each pod",
    )
    cluster.ask("waits", WAITS_GIB)
    cluster.until(lambda: is_refused(cluster.pod("waits")), "a pod is rejected")
    first = cluster.names[0]
    on_first = sorted(name for name in fills if cluster.node_of(name) == first)
    nodes, left = len(cluster.names), (GPU_BYTES // GIB - FILLS_GIB)
    in_all = f"{len(gpus) * left}.0 GiB"

    def ask(question: str, command: str, *truth: str) -> Answer:
        return Answer(question, command, kubectl(cluster, command), truth)

    yield ask(
        "Why is my pod pending, and what would help?",
        f"why {NAMESPACE}/waits",
        f"{nodes} nodes: insufficient GPU memory on any device",
        f"wait for pod {NAMESPACE}/fills-",
        f"needs {WAITS_GIB}.0 GiB, {left}.0 GiB free, {WAITS_GIB - left}.0 GiB short",
    )
    yield ask(
        "Are we full or fragmented?",
        f"capacity --vram {WAITS_GIB}Gi",
        f"fragmented: {in_all} are free in total, "
        f"and the largest request that fits is {left}.0 GiB",
    )
    yield ask(
        "Would it fit if that one ended?",
        f"whatif --pods 1 --vram {WAITS_GIB}Gi --release {NAMESPACE}/{on_first[0]}",
        "the pod is placed",
        first,
    )
    yield ask(
        "Why is this pod here?",
        f"why {NAMESPACE}/{on_first[0]}",
        f"bound to node {first}",
        f"requests 1 nvidia.com/gpu with {FILLS_GIB}Gi",
        "filter: ",
        "bind: bound",
    )
    gpu = cluster.machines[first].driver.gpus[0].uuid
    cluster.machines[first].driver.use(STRANGER_PID, {gpu: STRANGER_GIB * GIB})
    cluster.until(
        lambda: any(
            (device.unattributed_bytes or 0) >= STRANGER_GIB * GIB
            for device in reported(cluster, first)
        ),
        "a report that shows the unattributed process",
    )
    yield ask(
        "Who holds this GPU?",
        f"top gpu --search {gpu}",
        # The answer must show the measured use next to the reservations. A small unattributed part
        # is accepted.
        f"{FILLS_GIB}.0 GiB",
        f"{FILLS_GIB + STRANGER_GIB}.0 GiB",
        first,
    )
    yield ask("Who else is there?", "top pod -A", *on_first, first)
    last = cluster.names[-1]
    cluster.machines[last].kill("agent")
    events = f"{cluster.debug_url()}/v1/events?follow=false"
    cluster.until(lambda: "report_lost" in LOOPBACK.get(events).text, "a report that is lost")
    stale = "GPU report of the node is stale"
    yield ask(
        "What is wrong where?", f"top --search {last}", last, "GPU report of the node is stale"
    )
    yield ask(
        "Why not that node?",
        f"score {NAMESPACE}/waits --node {last}",
        stale,
    )
    yield ask("Which changes led to it?", "log --since 1h", "reservation_made", "report_lost", last)


def reported(cluster: RealCluster, node: str) -> list[Device]:
    status = cluster.gpunode(node).status
    return list(status.devices) if status else []


def kubectl(cluster: RealCluster, command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "headroom", "--server", cluster.debug_url(), *command.split()],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr
