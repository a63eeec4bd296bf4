"""The agent's process: the only place that wires, and one loop.

One thread samples and publishes. That is on purpose: where a driver call hangs, heartbeats stop
with it and the node goes stale, which is the truth. Exit status 3 asks for a new process, since
only that can talk to a driver that was replaced.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec
import structlog

from agent.devices import NvmlProbe
from agent.kubelet.probe import KubeletProbe
from agent.kubelet.watch import watched
from agent.nvml import DriverGone, Gate
from agent.plugin import ConfigurationProbe
from agent.probes import ConfiguredSharing, Follower, Probe
from agent.processes import ProcessProbe
from agent.publish import Courier
from agent.serve import Board, Server
from agent.settings import Settings, read_settings
from agent.summary import summarise
from contract.gpunode import GPUNodeStatus

if TYPE_CHECKING:
    from agent.nodeapi import NodeApi

_log = structlog.get_logger()

DRIVER_GONE_STATUS = 3
BAD_SETTINGS_STATUS = 2

#: However often the checkpoint changes.
SAMPLES_APART_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    stop = threading.Event()
    #: Set where a sample is due before its time.
    wake = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        wake.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    probes: list[Probe] = [
        NvmlProbe(Gate()),
        KubeletProbe(settings.checkpoint, settings.pod_resources),
        ConfigurationProbe(settings.proc),
    ]
    followers: list[Follower] = [ProcessProbe(settings.proc)]
    if settings.sharing_stated:
        probes.append(ConfiguredSharing(settings.resource, settings.replicas, settings.sharing))
    try:
        courier, api = _cluster(settings)
        if api is not None:
            probes.append(api)
            followers.insert(0, api)
        board = Board(settings.node, time.monotonic, stale_after_s=3 * settings.interval_s)
        server = None if settings.print_only else Server(board, settings.host, settings.port)
    except (_CannotStart, OSError) as err:
        _log.error("cannot_start", reason=str(err))
        return BAD_SETTINGS_STATUS
    if server is not None:
        server.start()
        _log.info("started", node=settings.node, port=server.port, pid=os.getpid())
    try:
        with watched(settings.checkpoint, wake.set):
            _loop(settings, probes, followers, courier, board, stop, wake)
    except DriverGone as err:
        _log.error("driver_gone", reason=str(err), hint="exiting, to be restarted")
        return DRIVER_GONE_STATUS
    finally:
        if server is not None:
            server.stop()
    _log.info("stopped")
    return 0


def _loop(
    settings: Settings,
    probes: Iterable[Probe],
    followers: Iterable[Follower],
    courier: Courier | None,
    board: Board,
    stop: threading.Event,
    wake: threading.Event,
) -> None:
    agent_version = _version()
    status: GPUNodeStatus | None = None
    due_s = time.monotonic()
    while not stop.is_set():
        # Taken before the sample: a pod removed after it may still be in there.
        observed_at = datetime.now(UTC)
        began_s = time.monotonic()
        readings = [reading for probe in probes for reading in probe.read()]
        for follower in followers:
            readings += follower.follow(readings)
        status = summarise(readings, observed_at, agent_version, before=status)
        board.show(status)
        if settings.print_only:
            sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
            sys.stdout.flush()
        if courier is not None:
            courier.deliver(status)
        if settings.once:
            return
        # Samples that took too long are skipped, not caught up with.
        due_s = max(due_s + settings.interval_s, time.monotonic())
        if wake.wait(due_s - time.monotonic()):
            # Pods often come in company: one sample for all that came within this time.
            stop.wait(began_s + SAMPLES_APART_S - time.monotonic())
            wake.clear()


class _CannotStart(Exception):
    pass


def _cluster(settings: Settings) -> tuple[Courier | None, "NodeApi | None"]:
    """Whoever delivers to the cluster and asks it; None where none is wanted."""
    if settings.print_only or not settings.publish:
        return None, None
    try:
        from agent.cluster import KubernetesPublisher, NoCluster, connect
        from agent.nodeapi import NodeApi
    except ImportError as err:
        raise _CannotStart(
            f"{err}; right is: pip install 'headroom-gpu[agent]', or --no-publish"
        ) from err
    try:
        client = connect()
    except NoCluster as err:
        raise _CannotStart(str(err)) from err
    publisher = KubernetesPublisher(client, settings.node, settings.namespace, settings.heartbeat_s)
    courier = Courier(
        publisher,
        settings.heartbeat_s,
        time.monotonic,
        lambda: datetime.now(UTC),
        random.Random(),
    )
    return courier, NodeApi(client, settings.node)


def _version() -> str:
    try:
        return version("headroom-gpu")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout


if __name__ == "__main__":
    sys.exit(main())
