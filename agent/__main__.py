"""The process of the agent, which builds all components and runs the sampling loop.

One thread samples and publishes. Driver calls run in other threads with a deadline
(agent.deadline), so a call that hangs makes its device unhealthy but does not stop heartbeats. If
the driver is replaced, the process restarts itself with execve, which keeps its pid and its
container, because NVML's library is loaded only once per process. A restart does not help if the
container has its own copy of the old library. So after ``MOST_TRIES`` restarts in a row the process
exits with ``GIVEN_UP_STATUS``, and the kubelet creates a new container.
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
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

import msgspec
import structlog

from agent.attribution import pod_sm
from agent.deadline import hurry
from agent.logs import log_to_stderr
from agent.once_report import table, well
from agent.probes.checkpoint import watched
from agent.probes.host_processes import is_new
from agent.probes.readings import DriverReading, Reading
from agent.sampler import SAMPLES_APART_S, Sampler, apart_s, device_probe_of, next_due_s
from agent.settings import Settings, read_settings
from headroom.contract.annotations import DeviceChoice
from headroom.contract.gpunode import GPUNodeStatus
from headroom.system.malloc import keep_small

if TYPE_CHECKING:
    from agent.gate_service import GateService
    from agent.http_endpoints import LatestSample, MetricsPort
    from agent.metrics_access import MetricsAccess
    from agent.probes.gpunode_watch import GPUNodeWatch
    from agent.probes.node_probe import NodeApi
    from agent.status_writer import StatusWriter
    from agent.steering.preferred_allocation import PreferredAllocation

_log = structlog.get_logger()

#: Exit status of --once if the node has no driver or one of its devices is unhealthy.
UNWELL_STATUS = 1
BAD_SETTINGS_STATUS = 2
GIVEN_UP_STATUS = 3

#: Environment variable that passes the number of restarts in a row to the next process, in the
#: format "<number> <monotonic time of the last restart in seconds>".
VARIABLE = "HEADROOM_AGENT_RESTARTS"
MOST_TRIES = 5
#: Seconds between the first and the second restart. The wait doubles after each later restart.
_FIRST_WAIT_S = 1.0

#: Blocks of at least this size are returned to the system when they are freed.
_LARGE_BYTES = 64 << 10
#: Number of new objects between two garbage collections. With Python's default of 700, collections
#: take a tenth of the time of a sample on a node with thousands of processes, although samples
#: contain almost no cycles.
_COLLECTED_AFTER = 20_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT, or once with --once, and return the exit status."""
    keep_small(_LARGE_BYTES, 2 * _LARGE_BYTES)
    gc.set_threshold(_COLLECTED_AFTER)
    settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    log_to_stderr()
    stop = threading.Event()
    #: This event is set to request a sample before it is due.
    requeue = threading.Event()

    def end() -> None:
        hurry()
        stop.set()
        requeue.set()

    after_signals(end)
    devices = device_probe_of(settings)
    sampler = Sampler(settings, devices)
    try:
        if settings.once:
            return _print_once(settings, sampler, stop)
        return _run(settings, sampler, stop, requeue)
    finally:
        sampler.close()
        devices.close()


def after_signals(end: Callable[[], None]) -> None:
    """Call ``end`` in a thread after SIGTERM or SIGINT.

    The handler does not call ``end`` itself. It runs in the main thread, which may already hold the
    lock of an event that ``end`` sets, for example because of an earlier signal, and would then
    wait for itself.
    """

    def handle(*_: object) -> None:
        threading.Thread(target=end, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _print_once(settings: Settings, sampler: Sampler, stop: threading.Event) -> int:
    """Print a table or JSON. Return the exit status, which is 0 if the driver and all devices are
    healthy."""
    status, readings = sampler.take()
    if settings.pause_s:
        # SM activity is computed from two samples.
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


class _CannotStart(Exception):
    """The agent cannot use the cluster. The message states the reason and what to do."""


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The components that use the API server."""

    status_writer: "StatusWriter"
    gate_service: "GateService"
    node_api: "NodeApi"
    gpunode_watch: "GPUNodeWatch"
    allocation: "PreferredAllocation"
    metrics_access: "MetricsAccess"


def _cluster(settings: Settings, board: "LatestSample", requeue: threading.Event) -> _Cluster:
    """Build the components that use the API server. Raises ``_CannotStart``."""
    try:
        from agent.gate_service import GateService
        from agent.gate_starts import GateStarts
        from agent.kube_client import NoCluster, connect
        from agent.kube_publisher import KubernetesPublisher
        from agent.metrics_access import KubeReview, MetricsAccess
        from agent.overuse import overuse
        from agent.probes.gpunode_watch import GPUNodeWatch
        from agent.probes.node_probe import NodeApi
        from agent.status_writer import StatusWriter
        from agent.steering.preferred_allocation import PreferredAllocation
    except ImportError as err:
        raise _CannotStart(
            f"{err}. Run pip install 'headroom-gpu[agent]', or pass --no-publish"
        ) from err
    try:
        server = connect()
    except NoCluster as err:
        raise _CannotStart(str(err)) from err
    publisher = KubernetesPublisher(server, settings.node, settings.namespace, settings.heartbeat_s)
    kubelet = settings.checkpoint.parent / "kubelet.sock"
    node_api = NodeApi(server, settings.node, changing=lambda: is_new(kubelet))
    gpunode_watch = GPUNodeWatch(server, settings.node, requeue.set)

    def mode() -> DeviceChoice | None:
        # The watch of the GPUNode shows changes immediately, while the Node is read only once a
        # minute. The Node's annotation counts only until the watch has returned a GPUNode.
        choice = gpunode_watch.device_choice
        choice = node_api.device_choice if choice is None else choice
        if choice is None:
            return None
        return DeviceChoice(choice) if choice else settings.device_choice

    return _Cluster(
        StatusWriter(
            publisher,
            settings.heartbeat_s,
            time.monotonic,
            lambda: datetime.now(UTC),
            random.Random(),
            lambda status: overuse(status, gpunode_watch.ledger),
        ),
        GateService(
            publisher,
            lambda: board.fresh,
            lambda: node_api.reserve_bytes,
            time.monotonic,
            GateStarts(settings.state),
        ),
        node_api,
        gpunode_watch,
        PreferredAllocation(
            settings.checkpoint,
            settings.pod_resources,
            publisher,
            lambda: board.fresh,
            lambda: node_api.reserve_bytes,
            mode,
            lambda: node_api.kubelet_version,
            requeue.set,
        ),
        MetricsAccess(KubeReview(server), time.monotonic),
    )


def _metrics_port(settings: Settings, access: "MetricsAccess | None") -> "MetricsPort | None":
    """Return the port that serves metrics over TLS, or None if there is no certificate.

    Without a cluster (``access`` is None), the port can serve only open metrics, because no API
    server can review tokens.
    """
    from agent.http_endpoints import MetricsPort
    from agent.serving_tls import ServingTls

    if settings.tls_cert is None or settings.tls_key is None:
        return None
    if access is None and not settings.open_metrics:
        return None
    tls = ServingTls(settings.tls_cert, settings.tls_key)
    allowed = None if settings.open_metrics else access
    return MetricsPort(settings.metrics_host, settings.metrics_port, tls, allowed)


def _run(
    settings: Settings, sampler: Sampler, stop: threading.Event, requeue: threading.Event
) -> int:
    """Start all threads, sample until ``stop`` is set, and return the exit status."""
    from agent.http_endpoints import LatestSample, Server

    # A sample may wait for two calls that hang: one to the driver and one to a device.
    stale_after_s = 3 * settings.interval_s + 2 * settings.driver_timeout_s
    board = LatestSample(settings.node, time.monotonic, stale_after_s)
    cluster: _Cluster | None = None
    server: Server | None = None
    at = settings.host, settings.port, settings.local_port
    try:
        if settings.publish and not settings.as_json:
            cluster = _cluster(settings, board, requeue)
            allocation = cluster.allocation
            server = Server(
                board,
                *at,
                cluster.gate_service.ask,
                cluster.status_writer.writes,
                allocation.answers,
                lambda: allocation.is_stuck,
                _metrics_port(settings, cluster.metrics_access),
                settings.open_metrics,
            )
            sampler.add_cluster(
                cluster.node_api,
                cluster.gpunode_watch,
                allocation,
                pause=allocation.yield_to_answers,
            )
        elif not settings.as_json:
            metrics_port = _metrics_port(settings, None)
            server = Server(
                board, *at, None, {}, metrics_port=metrics_port, open_metrics=settings.open_metrics
            )
    except (_CannotStart, OSError) as err:
        _log.error("cannot_start", reason=str(err))
        return BAD_SETTINGS_STATUS
    if server is not None:
        server.start()
        ports = {"port": server.port, "local_port": server.local_port}
        if server.metrics_port is not None:
            ports["metrics_port"] = server.metrics_port
        _log.info("started", node=settings.node, **ports, pid=os.getpid())
    if cluster is not None:
        cluster.gpunode_watch.start()
    try:
        with watched(settings.checkpoint, requeue.set):
            _loop(settings, sampler, cluster, board, stop, requeue)
    except GivenUp as err:
        _log.error("driver_gone", reason=str(err), hint="exiting so that the container restarts")
        return GIVEN_UP_STATUS
    finally:
        if cluster is not None:
            cluster.gpunode_watch.stop()
            _leave(cluster, sampler, board, settings.stale_after_s)
        if server is not None:
            server.stop()
    _log.info("stopped")
    return 0


def _loop(
    settings: Settings,
    sampler: Sampler,
    cluster: _Cluster | None,
    board: "LatestSample",
    stop: threading.Event,
    requeue: threading.Event,
) -> None:
    """Take samples and publish them until ``stop`` is set. Raises ``GivenUp``.

    A sample is due every ``settings.interval_s``, and earlier if ``requeue`` is set.
    """
    restarts = Restarts(os.environ, time.monotonic)
    due_s = time.monotonic()
    while not stop.is_set():
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        status, readings = sampler.take()
        board.set(status, pod_sm(readings))
        if settings.as_json:
            _print_json(status)
        needed_in_s = math.inf
        if cluster is not None:
            needed_in_s = cluster.status_writer.deliver(status, began_s)
        _restart_if_due(restarts, readings, sampler.devices.hanging)
        del status, readings  # free their memory before the next sample is taken
        cpu_s = time.process_time() - began_cpu_s
        now_s = time.monotonic()
        due_s = next_due_s(due_s, now_s, settings.interval_s, needed_in_s)
        if requeue.wait(due_s - now_s):
            # Several pods often arrive together, so take one sample for all of them.
            stop.wait(began_s + apart_s(cpu_s, settings.interval_s) - time.monotonic())
            requeue.clear()


def _leave(
    cluster: _Cluster, sampler: Sampler, board: "LatestSample", stale_after_s: float
) -> None:
    """End steering as ``agent.steering.leaving`` describes."""
    from agent.steering.leaving import leave

    def report() -> None:
        began_s = time.monotonic()
        status, readings = sampler.take()
        board.set(status, pod_sm(readings))
        cluster.status_writer.deliver(status, began_s)

    leave(cluster.allocation, report, SAMPLES_APART_S, stale_after_s)


class GivenUp(Exception):
    """Restarting the process several times in a row has not made the driver usable."""


class Restarts:
    """Counts restarts in a row in the environment, which the restarted process inherits."""

    def __init__(
        self, environment: MutableMapping[str, str], monotonic: Callable[[], float]
    ) -> None:
        self._environment = environment
        self._monotonic = monotonic
        tries, _, last_s = environment.get(VARIABLE, "").partition(" ")
        try:
            self._tries, self._last_s = int(tries), float(last_s)
        except ValueError:
            self._tries, self._last_s = 0, 0.0

    def well(self) -> None:
        """Reset the count, because the driver answers."""
        self._tries = 0
        self._environment.pop(VARIABLE, None)

    def due(self) -> bool:
        """Return whether to restart now. The wait doubles with each restart. Raises ``GivenUp``."""
        if self._tries >= MOST_TRIES:
            raise GivenUp(f"{self._tries} restarts in a row did not help")
        wait_s = _FIRST_WAIT_S * 2.0 ** (self._tries - 1) if self._tries else 0.0
        return self._monotonic() - self._last_s >= wait_s

    def restart(self, executable: str, argv: Sequence[str]) -> NoReturn:
        """Restart this process with the same pid. ``argv`` is sys.orig_argv."""
        self._environment[VARIABLE] = f"{self._tries + 1} {self._monotonic()}"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(executable, [executable, *argv[1:]], dict(self._environment))


def _restart_if_due(restarts: Restarts, readings: Iterable[Reading], hanging: bool) -> None:
    """Restart the process if only a new process can use the driver. Raises ``GivenUp``."""
    (driver,) = (reading for reading in readings if isinstance(reading, DriverReading))
    if not driver.why_not:
        restarts.well()
    elif driver.gone and not hanging and restarts.due():
        # Do not restart while a driver call hangs. execve would wait for its thread, perhaps
        # forever, and the agent could not report the hanging call.
        _log.warning("driver_gone", reason=driver.why_not, hint="restarting the process")
        restarts.restart(sys.executable, sys.orig_argv)


if __name__ == "__main__":
    sys.exit(main())
