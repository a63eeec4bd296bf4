"""The agent's process: builds all components and runs the sampling loop.

One thread samples and publishes. Driver calls run in other threads and have a deadline
(agent.deadline), so a call that hangs makes its device unhealthy but does not stop heartbeats. If
the driver was replaced, the process restarts itself (agent.restart). If that does not help, it
exits with status 3, and the kubelet creates a new container.
"""

import gc
import math
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec
import structlog

from agent.deadline import hurry
from agent.gate_service import GateService
from agent.http_endpoints import Board, Server
from agent.probes.dcgm import TIMEOUT_S, Exporter
from agent.probes.device_probe import Survey, incarnation, own_cgroup
from agent.probes.driver_limits_probe import ASK_EVERY_S, LimitsProbe
from agent.probes.health_store import StateFile
from agent.probes.kubelet.file_watch import watched
from agent.probes.kubelet.probe import KubeletProbe
from agent.probes.nvml import Gate
from agent.probes.nvml_probe import NvmlProbe
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.processes import ProcessProbe
from agent.probes.readings import ConfiguredSharing, DriverReading, Follower, Probe, Reading
from agent.probes.xids import XidWatch
from agent.restart import GIVEN_UP_STATUS, GivenUp, Restarts
from agent.settings import Settings, read_settings
from agent.status.builder import rfc3339, summarise
from agent.status.once_report import table, well
from agent.status.pod_sm_activity import pod_sm
from agent.status.writer import StatusWriter
from contract.annotations import DeviceChoice
from contract.gpunode import GPUNodeStatus
from contract.malloc import keep_small

if TYPE_CHECKING:
    from agent.probes.node_probe import NodeApi
    from agent.status.publisher import KubernetesPublisher
    from agent.steering.device_choice_watch import ChoiceWatch
    from agent.steering.preferred_allocation import PreferredAllocation

_log = structlog.get_logger()

#: Exit status of --once if there is no driver or a device is unhealthy.
UNWELL_STATUS = 1
BAD_SETTINGS_STATUS = 2

#: malloc returns freed blocks of at least this size to the system.
_LARGE_BYTES = 64 << 10
#: New objects between two garbage collections. With Python's default of 700, collections take a
#: tenth of a sample on a node with thousands of processes, and samples contain almost no cycles.
_COLLECTED_AFTER = 20_000
#: Minimum of seconds between two samples, however often the checkpoint changes. See ``apart_s``.
SAMPLES_APART_S = 0.5
#: Share of one core that samples may take while pods arrive continuously.
CORE_SHARE = 0.02
#: Seconds to wait for unconfirmed pods when the agent ends, so they get the device that the ledger
#: chose.
LEAVE_WITHIN_S = 6.0


def main(argv: Sequence[str] | None = None) -> int:
    keep_small(_LARGE_BYTES, 2 * _LARGE_BYTES)
    gc.set_threshold(_COLLECTED_AFTER)
    settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    log_to_stderr()
    stop = threading.Event()
    #: Set to request a sample before it is due.
    requeue = threading.Event()

    def end(*_: object) -> None:
        hurry()
        stop.set()
        requeue.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    survey = survey_of(settings)
    sampler = Sampler(settings, survey)
    try:
        if settings.once:
            return _print_once(settings, sampler, stop)
        return _run(settings, sampler, stop, requeue)
    finally:
        survey.close()


def log_to_stderr() -> None:
    """Configure logging: one JSON object per line on stderr."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class Sampler:
    """Takes samples: reads every probe, then every follower, which adds to the readings."""

    def __init__(self, settings: Settings, survey: Survey) -> None:
        self.survey = survey
        self.probes: list[Probe] = [
            survey,
            KubeletProbe(settings.checkpoint, settings.pod_resources),
            ConfigurationProbe(settings.proc, settings.checkpoint.parent),
        ]
        self.followers: list[Follower] = [survey, ProcessProbe(settings.proc)]
        if settings.sharing_stated:
            stated = ConfiguredSharing(settings.resource, settings.replicas, settings.sharing)
            self.probes.append(stated)
        self._agent_version = _version()
        self._last: GPUNodeStatus | None = None

    def take(self) -> tuple[GPUNodeStatus, list[Reading]]:
        # Taken before the sample: a pod that was removed later may still be in it.
        observed_at = datetime.now(UTC)
        readings = [reading for probe in self.probes for reading in probe.read()]
        for follower in self.followers:
            readings += follower.follow(readings)
        self._last = summarise(readings, observed_at, self._agent_version, before=self._last)
        return self._last, readings


def _print_once(settings: Settings, sampler: Sampler, stop: threading.Event) -> int:
    """Print a table or JSON; return the exit status, 0 if driver and devices are healthy."""
    status, readings = sampler.take()
    if settings.pause_s:
        # SM activity compares two samples.
        stop.wait(settings.pause_s)
        status, readings = sampler.take()
    if settings.as_json:
        _print_json(status)
    else:
        sys.stdout.write(table(settings.node or socket.gethostname(), status, pod_sm(readings)))
    return 0 if well(status) else UNWELL_STATUS


def _print_json(status: GPUNodeStatus) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
    sys.stdout.flush()


def _run(
    settings: Settings, sampler: Sampler, stop: threading.Event, requeue: threading.Event
) -> int:
    # A sample may wait for two hanging calls: one about the driver, then one about a device.
    stale_after_s = 3 * settings.interval_s + 2 * settings.driver_timeout_s
    board = Board(settings.node, time.monotonic, stale_after_s)
    status_writer: StatusWriter | None = None
    server: Server | None = None
    allocation: PreferredAllocation | None = None
    choices: ChoiceWatch | None = None
    try:
        if settings.publish and not settings.as_json:
            status_writer, gate_service, api, publisher, choices = _cluster(
                settings, board, requeue
            )
            sampler.probes.append(api)
            sampler.survey.maintenance = lambda: api.maintenance
            sampler.followers.insert(0, api)
            allocation = _allocation(settings, publisher, board, api, choices, requeue)
        if not settings.as_json:
            ask = None if status_writer is None else gate_service.ask
            writes = {} if status_writer is None else status_writer.writes
            answers = None if allocation is None else allocation.answers
            stuck = (lambda: False) if allocation is None else (lambda: allocation.is_stuck)
            at = settings.host, settings.port, settings.local_port
            server = Server(board, *at, ask, writes, answers, stuck)
    except (_CannotStart, OSError) as err:
        _log.error("cannot_start", reason=str(err))
        return BAD_SETTINGS_STATUS
    if server is not None:
        server.start()
        ports = {"port": server.port, "local_port": server.local_port}
        _log.info("started", node=settings.node, **ports, pid=os.getpid())
    if allocation is not None and choices is not None:
        sampler.followers.append(allocation)
        choices.start()
    try:
        with watched(settings.checkpoint, requeue.set):
            _loop(settings, sampler, status_writer, board, stop, requeue)
    except GivenUp as err:
        _log.error("driver_gone", reason=str(err), hint="exiting so that the container restarts")
        return GIVEN_UP_STATUS
    finally:
        if choices is not None:
            choices.stop()
        if allocation is not None and status_writer is not None:
            _leave(allocation, sampler, status_writer, board)
        if server is not None:
            server.stop()
    _log.info("stopped")
    return 0


def _leave(
    allocation: "PreferredAllocation", sampler: Sampler, status_writer: StatusWriter, board: Board
) -> None:
    """Return the resources to their plugins if no reservation depends on the agent's choice.

    Otherwise the resources have no replicas until the next agent starts, as after a kill.
    """
    if not allocation.has_resources:
        allocation.stop()
        return
    allocation.leave()
    until_s = time.monotonic() + LEAVE_WITHIN_S
    while time.monotonic() < until_s and not allocation.may_leave:
        began_s = time.monotonic()
        status, readings = sampler.take()
        board.show(status, pod_sm(readings))
        status_writer.deliver(status, began_s)
        time.sleep(SAMPLES_APART_S)
    may_leave = allocation.may_leave
    if not may_leave:
        why = "reservations of unconfirmed pods are for the device that this agent would choose"
        _log.warning("plugin_not_brought_back", reason=why, hint="the next agent does it")
    allocation.stop(may_leave)


def _loop(
    settings: Settings,
    sampler: Sampler,
    status_writer: StatusWriter | None,
    board: Board,
    stop: threading.Event,
    requeue: threading.Event,
) -> None:
    restarts = Restarts(os.environ, time.monotonic)
    due_s = time.monotonic()
    while not stop.is_set():
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        status, readings = sampler.take()
        board.show(status, pod_sm(readings))
        if settings.as_json:
            _print_json(status)
        wanted_s = math.inf
        if status_writer is not None:
            wanted_s = status_writer.deliver(status, began_s)
        _restart_where_due(restarts, readings, sampler.survey.hanging)
        del status, readings  # do not keep them in memory while the next sample is taken
        cpu_s = time.process_time() - began_cpu_s
        now_s = time.monotonic()
        due_s = next_due_s(due_s, now_s, settings.interval_s, wanted_s)
        if requeue.wait(due_s - now_s):
            # Several pods often arrive together, so take one sample for all of them.
            stop.wait(began_s + apart_s(cpu_s, settings.interval_s) - time.monotonic())
            requeue.clear()


def apart_s(cpu_s: float, interval_s: float) -> float:
    """Return the minimum of seconds between two samples, the first of which took ``cpu_s``."""
    return max(SAMPLES_APART_S, min(cpu_s / CORE_SHARE, interval_s))


def next_due_s(due_s: float, now_s: float, interval_s: float, wanted_s: float) -> float:
    """Return the time of the next sample, on the clock of ``due_s`` and ``now_s``.

    ``wanted_s`` is the number of seconds after which a sample is needed earlier. Missed samples are
    skipped. An early sample does not delay the following ones.
    """
    return min(max(due_s + interval_s, now_s), now_s + min(interval_s, wanted_s))


def _restart_where_due(restarts: Restarts, readings: Iterable[Reading], hanging: bool) -> None:
    """Restart the process if only a new one can use the driver. Raises ``GivenUp``."""
    (driver,) = (reading for reading in readings if isinstance(reading, DriverReading))
    if not driver.why_not:
        restarts.well()
    elif driver.gone and not hanging and restarts.due():
        # Not while a call hangs: execve waits for the call's thread, perhaps forever, and the agent
        # could not report that.
        _log.warning("driver_gone", reason=driver.why_not, hint="restarting the process")
        restarts.restart(sys.executable, sys.orig_argv)


def survey_of(settings: Settings, exporter_timeout_s: float = TIMEOUT_S) -> Survey:
    """Build the probe of the devices from the settings."""
    gate = Gate()
    return Survey(
        NvmlProbe(gate, settings.driver_timeout_s, cgroup=own_cgroup()),
        XidWatch(gate, settings.driver_timeout_s),
        Exporter(settings.dcgm_url, settings.dcgm_interval_s, exporter_timeout_s)
        if settings.dcgm_url
        else None,
        LimitsProbe(gate, settings.driver_timeout_s, settings.cgroups, ASK_EVERY_S),
        StateFile(settings.state),
        incarnation,
        time.monotonic,
        lambda: rfc3339(datetime.now(UTC)),
    )


class _CannotStart(Exception):
    pass


def _allocation(
    settings: Settings,
    publisher: "KubernetesPublisher",
    board: Board,
    api: "NodeApi",
    choices: "ChoiceWatch",
    requeue: threading.Event,
) -> "PreferredAllocation":
    """Build the component that makes the kubelet allocate the device that the ledger chose."""
    from agent.steering.preferred_allocation import PreferredAllocation

    def mode() -> DeviceChoice | None:
        # The GPUNode is watched, so it is more current. Without one the Node's annotation counts.
        choice = api.device_choice if choices.device_choice is None else choices.device_choice
        if choice is None:
            return None
        return DeviceChoice(choice) if choice else settings.device_choice

    return PreferredAllocation(
        settings.checkpoint,
        settings.pod_resources,
        publisher,
        lambda: board.fresh,
        lambda: api.reserve_bytes,
        mode,
        requeue.set,
    )


def _cluster(
    settings: Settings, board: Board, requeue: threading.Event
) -> "tuple[StatusWriter, GateService, NodeApi, KubernetesPublisher, ChoiceWatch]":
    """Build the components that use the API server. Raises ``_CannotStart``."""
    try:
        from agent.kube.client import NoCluster, connect
        from agent.probes.node_probe import NodeApi
        from agent.status.publisher import KubernetesPublisher
        from agent.steering.device_choice_watch import ChoiceWatch
    except ImportError as err:
        raise _CannotStart(
            f"{err}. Run pip install 'headroom-gpu[agent]', or pass --no-publish"
        ) from err
    try:
        server = connect()
    except NoCluster as err:
        raise _CannotStart(str(err)) from err
    publisher = KubernetesPublisher(server, settings.node, settings.namespace, settings.heartbeat_s)
    status_writer = StatusWriter(
        publisher,
        settings.heartbeat_s,
        time.monotonic,
        lambda: datetime.now(UTC),
        random.Random(),
    )
    api = NodeApi(server, settings.node)
    gate_service = GateService(
        publisher, lambda: board.fresh, lambda: api.reserve_bytes, time.monotonic
    )
    return (
        status_writer,
        gate_service,
        api,
        publisher,
        ChoiceWatch(server, settings.node, requeue.set),
    )


def _version() -> str:
    try:
        return version("headroom-gpu")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout


if __name__ == "__main__":
    sys.exit(main())
