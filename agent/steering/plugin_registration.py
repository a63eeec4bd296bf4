"""Registers the plugin proxy with the kubelet, and the plugin again when the agent ends.

If two endpoints register for one resource, the kubelet (1.34 to 1.36, from its source and tests)
calls the endpoint that registered last, and reads the device lists of both. When the stream of
*either* ends, it drops the current endpoint and counts all devices as gone. Consequences:

* A plugin that restarts registers, and is the current endpoint until the proxy registers again. The
  plugin creates its socket just before it registers, and its registration cannot be observed. So
  the proxy registers when it sees the new socket, and again later, in case it was first. Until the
  last of these registrations the resource is not reported as steered.
* A kubelet that restarts forgets all endpoints and removes the proxy's socket. The plugin then
  creates its socket again, as above.
* The plugin is registered again only after the kubelet has noticed that the proxy is gone. Before
  that, the end of the proxy's stream would make the kubelet drop the plugin.
* If an agent is killed while it registers, the kubelet may read its message after the end of its
  streams. Then it counts devices as healthy that no endpoint serves. So an agent that finds the
  socket of a killed agent registers the plugin again, whatever the kubelet reports.
"""

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from agent.probes.host_processes import identity
from agent.probes.protobuf import BadMessage
from agent.steering.messages import asks_for_preference
from agent.steering.plugin_proxy import (
    PREFIX,
    Choose,
    PluginProxy,
    options_of,
    register,
)

_log = structlog.get_logger()

CHECK_EVERY_S = 0.2
#: Ages in seconds of the newest socket (plugin or kubelet) at which the proxy registers. After the
#: last one the proxy is certainly the current endpoint.
REGISTER_AT_S = (0.0, 1.0, 3.0)
RETRY_S = 1.0
#: Seconds to wait until the kubelet notices that the proxy is gone, or that the plugin is back.
NOTICE_S = 3.0
#: Seconds for which the plugin's devices must stay healthy to count as back.
STAYS_S = 1.0
_BACK_TRIES = 5

#: Returns whether the kubelet has healthy devices of the resource; None if unknown.
Healthy = Callable[[str], bool | None]


def plugin_socket(resource: str) -> str:
    """Return the file name of the socket that NVIDIA's plugin creates for a resource."""
    return f"nvidia-{resource.removeprefix('nvidia.com/')}.sock"


def resource_of(socket: str) -> str:
    """Return the resource that NVIDIA's plugin serves on a socket, given the socket's file name."""
    return f"nvidia.com/{socket.removeprefix('nvidia-').removesuffix('.sock')}"


class NodeLock:
    """A lock that only one of several agents on a node can hold. ``acquire`` does not wait.

    It locks the kubelet's directory itself, because a kubelet that starts removes all files in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None

    def acquire(self) -> bool:
        """Try to take the lock; return whether this agent holds it."""
        if self._lock is None:
            try:
                lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                return False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class PluginRegistration:
    """Keeps the proxy of one resource registered, in its own thread.

    ``folder`` is the kubelet's device plugin directory. ``changed`` is called whenever ``steers``
    has changed. ``promotes`` returns whether the kubelet uses the plugin again by itself when the
    proxy ends. Such a kubelet must not get a second registration of a socket.
    """

    def __init__(
        self,
        folder: Path,
        lock: NodeLock,
        resource: str,
        choose: Choose,
        healthy: Healthy,
        changed: Callable[[], object],
        promotes: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resource = resource
        self._folder = folder
        self._lock_on_node = lock
        self._plugin = plugin_socket(resource)
        self._choose = choose
        self._healthy = healthy
        self._changed = changed
        self._promotes = promotes
        self._monotonic = monotonic
        self._proxy: PluginProxy | None = None
        #: Identities of the plugin's and the kubelet's socket at the last check; None: register
        #: again.
        self._seen: tuple[object, object] | None = None
        #: When these sockets were first seen, and the number of ``REGISTER_AT_S`` done since.
        self._since_s = 0.0
        self._registered = 0
        #: Earliest time of the next registration.
        self._retry_at_s = 0.0
        #: Why the kubelet does not call the proxy; empty if it does or soon will.
        self.trouble = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def steers(self) -> bool:
        """Whether the proxy is certainly the kubelet's current endpoint."""
        proxy = self._proxy
        return (
            proxy is not None
            and proxy.watched
            and self._registered == len(REGISTER_AT_S)
            and not self._end.is_set()
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the proxy has stopped answering the kubelet's calls."""
        return self._proxy is not None and self._proxy.is_stuck

    def take_passed(self, replicas: tuple[str, ...]) -> bool:
        """As ``PluginProxy.take_passed``; false while there is no proxy."""
        return self._proxy is not None and self._proxy.take_passed(replicas)

    def bypassed(self) -> None:
        """Request new registrations, because a container got a device without the proxy."""
        _log.warning("steering_bypassed", resource=self.resource)
        self._seen = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, bring_plugin_back: bool = True) -> None:
        """Return the resource to its plugin, or leave it without replicas.

        In the second case a socket stays, so that the next agent registers the plugin again.
        """
        self._end.set()
        self._thread.join()
        if self._proxy is None:
            return
        self._proxy.stop()
        if self._promotes():
            return
        if bring_plugin_back:
            bring_back(self._folder, self._plugin, self._healthy)
        else:
            _leave_socket(self._folder / (PREFIX + self._plugin))

    def update(self) -> None:
        """Create the proxy if it does not listen, and register it if a registration is due."""
        plugin = identity(self._folder / self._plugin)
        kubelet = identity(self._folder / "kubelet.sock")
        now_s = self._monotonic()
        if plugin is None or kubelet is None or not self._lock_on_node.acquire():
            self._seen, self._registered = None, 0
            missing = self._plugin if plugin is None else "kubelet.sock"
            is_missing = plugin is None or kubelet is None
            self.trouble = (
                f"there is no socket {missing}"
                if is_missing
                else "another agent on the node steers it"
            )
            return
        if self._proxy is None or not self._proxy.listening:
            if self._proxy is not None:
                self._proxy.stop()
            self._proxy = PluginProxy(self._folder, self._plugin, self._choose)
            self._seen = None
        if (plugin, kubelet) != self._seen:
            self._seen, self._since_s, self._registered = (plugin, kubelet), now_s, 0
        due = sum(now_s - self._since_s >= age_s for age_s in REGISTER_AT_S)
        is_unwatched = not self._proxy.watched
        if (due > self._registered or is_unwatched) and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + (RETRY_S if is_unwatched else 0.0)
            if self._register(self._proxy):
                self._registered = due

    def _register(self, proxy: PluginProxy) -> bool:
        """Register the proxy; return whether it succeeded. If not, ``trouble`` has the reason."""
        try:
            options = proxy.options()
            if asks_for_preference(options):
                register(self._folder, proxy.endpoint, self.resource, options)
                self.trouble = ""
                _log.info("steering_registered", resource=self.resource)
                return True
            trouble = "the device plugin does not support GetPreferredAllocation"
        except grpc.RpcError as err:
            trouble = _status(err)
        except BadMessage:
            trouble = "the device plugin's options cannot be read"
        if trouble != self.trouble:
            _log.warning("steering_not_registered", resource=self.resource, reason=trouble)
            self.trouble = trouble
        return False

    def _run(self) -> None:
        steered = False
        while not self._end.wait(CHECK_EVERY_S):
            try:
                self.update()
            except Exception:  # noqa: BLE001 - without this thread the proxy would not register
                _log.exception("steering_broken", resource=self.resource)
            if self.steers != steered:
                steered = not steered
                self._changed()


def bring_back(folder: Path, plugin: str, healthy: Healthy) -> bool:
    """Register the plugin itself, and return whether the kubelet uses it again.

    First wait, at most ``NOTICE_S``, until the kubelet has noticed that the proxy is gone. If the
    plugin does not answer ``_BACK_TRIES`` times, it needs no help: it registers when it starts.
    """
    resource = resource_of(plugin)
    _until(lambda: healthy(resource) is False)
    for _ in range(_BACK_TRIES):
        try:
            register(folder, plugin, resource, options_of(folder, plugin))
        except grpc.RpcError as err:
            _log.warning("plugin_not_brought_back", resource=resource, reason=_status(err))
            time.sleep(RETRY_S)
            continue
        _until(lambda: healthy(resource) is True)
        time.sleep(STAYS_S)
        if healthy(resource) is not False:
            _log.info("plugin_brought_back", resource=resource)
            return True
    return False


def leftovers(folder: Path) -> list[str]:
    """Return the file names of the sockets of plugins that a killed agent has left unregistered."""
    return sorted(each.name.removeprefix(PREFIX) for each in folder.glob(f"{PREFIX}*.sock"))


def restore(folder: Path, plugin: str, healthy: Healthy, promotes: bool) -> None:
    """Register a plugin that a killed agent left unregistered, and remove the agent's socket.

    The socket is removed even if the plugin does not answer. ``promotes``: whether the kubelet has
    used the plugin again by itself; see ``PluginRegistration``.
    """
    if not promotes:
        bring_back(folder, plugin, healthy)
    try:
        (folder / (PREFIX + plugin)).unlink(missing_ok=True)
    except OSError as err:
        # Without permission to steer the directory is read-only. A kubelet that starts clears it.
        _log.info("steering_socket_stays", plugin=plugin, reason=err.strerror)


def _leave_socket(path: Path) -> None:
    """Create a socket file like the one that a killed agent leaves."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:
        path.unlink(missing_ok=True)
        made.bind(str(path))


def _until(done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns true, at most ``NOTICE_S`` seconds."""
    deadline_s = time.monotonic() + NOTICE_S
    while not done() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _status(err: grpc.RpcError) -> str:
    return f"{err.code().name}: {err.details()}"
