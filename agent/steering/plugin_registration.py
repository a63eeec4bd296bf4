"""Sees to it that the kubelet asks the relay, and the plugin again when the agent goes.

What a kubelet makes of two that register for one resource (1.34 to 1.36, read and tried): it asks
whoever registered last, listens to both, and when the stream of *either* ends it drops whoever is
current and takes all devices for gone. So:

* A plugin that starts anew registers, and is current until we register once more. It makes its
  socket a moment before that, so we register when we see the socket and again later, in case we
  were faster than it: its registration cannot be seen. Until then nothing is said to be steered.
* A kubelet that starts anew forgets everybody and removes our socket; the plugin makes its own
  anew, as above.
* The plugin is brought back only after the kubelet has noticed that we are gone: earlier, the
  kubelet would drop the plugin for us.
* Of an agent that is killed while it registers a message can be read after the end of its streams:
  then the kubelet takes devices for healthy that nobody gives out. So whoever finds the socket of
  a killed agent brings the plugin back, whatever the kubelet says of the devices.
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

from agent.probes.kubelet.protobuf import BadMessage
from agent.steering.messages import asks_for_preference
from agent.steering.plugin_proxy import (
    PREFIX,
    Choose,
    PluginProxy,
    identity,
    options_of,
    register,
)

_log = structlog.get_logger()

LOOK_EVERY_S = 0.2
#: Ages of the plugin's socket, or the kubelet's, at which we register; after the last we are sure.
REGISTER_AT_S = (0.0, 1.0, 3.0)
RETRY_S = 1.0
#: How long a kubelet may take to notice that we are gone, or the plugin back.
NOTICE_S = 3.0
#: How long the plugin's devices must be there before they count as back.
STAYS_S = 1.0
_BACK_TRIES = 5

#: Whether the kubelet has healthy devices of the resource; None: it does not tell.
Healthy = Callable[[str], bool | None]


def plugin_socket(resource: str) -> str:
    """The stock plugin's socket, by the name of its resource."""
    return f"nvidia-{resource.removeprefix('nvidia.com/')}.sock"


def resource_of(socket: str) -> str:
    return f"nvidia.com/{socket.removeprefix('nvidia-').removesuffix('.sock')}"


class Seat:
    """The place at the kubelet: of several agents on a node only one has it, the others wait.

    A lock on the folder itself: a kubelet that starts removes what is in there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None

    def take(self) -> bool:
        """Whether it is ours, now or already."""
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

    def leave(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class PluginRegistration:
    """Of one resource. ``folder`` is the kubelet's for device plugins."""

    def __init__(
        self,
        folder: Path,
        seat: Seat,
        resource: str,
        choose: Choose,
        healthy: Healthy,
        changed: Callable[[], object],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resource = resource
        self._folder = folder
        self._seat = seat
        self._plugin = plugin_socket(resource)
        self._choose = choose
        self._healthy = healthy
        self._changed = changed
        self._monotonic = monotonic
        self._proxy: PluginProxy | None = None
        #: Sockets of plugin and kubelet, since when they are these, and how often we registered.
        self._seen: tuple[object, object] | None = None
        self._since_s = 0.0
        self._registered = 0
        self._retry_at_s = 0.0
        #: Why the kubelet does not ask us; empty if it does or is about to.
        self.trouble = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def steers(self) -> bool:
        """Whether it is certain that the kubelet asks us, and nobody else."""
        proxy = self._proxy
        return (
            proxy is not None
            and proxy.watched
            and self._registered == len(REGISTER_AT_S)
            and not self._end.is_set()
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the kubelet's calls are not answered any more."""
        return self._proxy is not None and self._proxy.is_stuck

    def take_passed(self, replicas: tuple[str, ...]) -> bool:
        """Whether a container got these through us; each time counts once."""
        return self._proxy is not None and self._proxy.take_passed(replicas)

    def bypassed(self) -> None:
        """Somebody got a device without us: be current again."""
        _log.warning("steering_bypassed", resource=self.resource)
        self._seen = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, bring_plugin_back: bool = True) -> None:
        """Give the resource back to its plugin, or leave it without replicas; then a socket shows
        the next agent that the plugin has to be brought back."""
        self._end.set()
        self._thread.join()
        if self._proxy is None:
            return
        self._proxy.stop()
        if bring_plugin_back:
            bring_back(self._folder, self._plugin, self._healthy)
        else:
            _leave_socket(self._folder / (PREFIX + self._plugin))

    def look(self) -> None:
        """Register where that is due."""
        plugin = identity(self._folder / self._plugin)
        kubelet = identity(self._folder / "kubelet.sock")
        now_s = self._monotonic()
        if plugin is None or kubelet is None or not self._seat.take():
            self._seen, self._registered = None, 0
            missing = self._plugin if plugin is None else "kubelet.sock"
            away = plugin is None or kubelet is None
            self.trouble = (
                f"there is no socket {missing}" if away else "another agent of the node steers it"
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
        lost = not self._proxy.watched
        if (due > self._registered or lost) and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + (RETRY_S if lost else 0.0)
            if self._register(self._proxy):
                self._registered = due

    def _register(self, proxy: PluginProxy) -> bool:
        try:
            options = proxy.options()
            if asks_for_preference(options):
                register(self._folder, proxy.endpoint, self.resource, options)
                self.trouble = ""
                _log.info("steering_registered", resource=self.resource)
                return True
            trouble = "the plugin does not let the kubelet ask which device to take"
        except grpc.RpcError as err:
            trouble = _said(err)
        except BadMessage:
            trouble = "what the plugin says of itself cannot be read"
        if trouble != self.trouble:
            _log.warning("steering_not_registered", resource=self.resource, reason=trouble)
            self.trouble = trouble
        return False

    def _run(self) -> None:
        steered = False
        while not self._end.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - a thread that ended would leave it to itself, unseen
                _log.exception("steering_broken", resource=self.resource)
            if self.steers != steered:
                steered = not steered
                self._changed()


def bring_back(folder: Path, plugin: str, healthy: Healthy) -> bool:
    """Register the plugin in its own name, once the kubelet knows that we are gone.

    Where the kubelet does not tell, it is given time instead. A plugin that does not answer needs
    no help: it registers when it starts.
    """
    resource = resource_of(plugin)
    _until(lambda: healthy(resource) is False)
    for _ in range(_BACK_TRIES):
        try:
            register(folder, plugin, resource, options_of(folder, plugin))
        except grpc.RpcError as err:
            _log.warning("plugin_not_brought_back", resource=resource, reason=_said(err))
            time.sleep(RETRY_S)
            continue
        _until(lambda: healthy(resource) is True)
        time.sleep(STAYS_S)
        if healthy(resource) is not False:
            _log.info("plugin_brought_back", resource=resource)
            return True
    return False


def leftovers(folder: Path) -> list[str]:
    """The plugins whose place an agent took that did not live to bring them back."""
    return sorted(each.name.removeprefix(PREFIX) for each in folder.glob(f"{PREFIX}*.sock"))


def restore(folder: Path, plugin: str, healthy: Healthy) -> None:
    """Bring back a plugin that an agent left behind, and leave no trace of that agent."""
    bring_back(folder, plugin, healthy)
    try:
        (folder / (PREFIX + plugin)).unlink(missing_ok=True)
    except OSError as err:
        # An agent that may not steer has the folder read-only; the next kubelet empties it.
        _log.info("steering_socket_stays", plugin=plugin, reason=err.strerror)


def _leave_socket(path: Path) -> None:
    """As an agent that was killed leaves one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:
        path.unlink(missing_ok=True)
        made.bind(str(path))


def _until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + NOTICE_S
    while not done() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _said(err: grpc.RpcError) -> str:
    return f"{err.code().name}: {err.details()}"
