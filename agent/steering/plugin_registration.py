"""Registers the plugin proxy with the kubelet, and registers the plugin again when the agent stops.

If two endpoints register for one resource, the kubelet (1.31 to 1.36, according to its source and
tests) calls the endpoint that registered last, and reads the device lists of both. When the stream
of *either* endpoint ends, it drops the current endpoint and considers all devices gone. The proxy
sends no list, so the kubelet has healthy devices only if the plugin has sent a list after the last
drop. This has several consequences:

* A plugin that restarts registers itself, and is the current endpoint until the proxy registers
  again. The agent cannot observe this registration, but it can observe the plugin's first list,
  because the resource has healthy devices again. If the proxy registers after that, it is certain
  to be the current endpoint.
* A kubelet that restarts forgets all endpoints and removes the proxy's socket. The plugin creates
  its socket again and registers, as above.
* After the end of a proxy the kubelet needs a new list from the plugin, which it gets if the plugin
  itself is registered again. For a moment the plugin is the current endpoint. So the next agent
  first waits until no unconfirmed pod depends on an agent's choice, or until the kubelet has
  rejected all such pods. Then it registers the plugin, and after it the proxy.
* The plugin is registered again only after the kubelet has noticed that the proxy is gone. Before
  that, the end of the proxy's stream would make the kubelet drop the plugin.
* Each registration has a new socket name. Kubelet 1.37, which is not steered, would reject a second
  registration of a connected socket, and then not notice the end of the first.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from agent.probes.host_processes import identity, is_new
from agent.probes.protobuf import BadMessage
from agent.steering.messages import asks_for_preference
from agent.steering.plugin_proxy import (
    Choose,
    PluginProxy,
    options_of,
    register,
    socket_of,
)
from agent.steering.plugin_return import (
    PATIENCE,
    RETRY_S,
    Healthy,
    Patience,
    bring_back,
    leave_socket,
    plugin_socket,
    remove_proxies,
    status,
    wait_until,
)

_log = structlog.get_logger()

CHECK_EVERY_S = 0.2
#: Seconds within which a plugin or kubelet that has created its socket completes the registration.
#: During this time the proxy waits for healthy devices.
SETTLED_S = 3.0
#: Seconds in which a kubelet without healthy devices has rejected every pod that was bound before.
#: Reservations that are still unconfirmed after this time belong to pods that have ended.
DECIDED_S = 6.0
#: Seconds between two checks that the kubelet still has healthy devices. A check that finds none
#: replaces the proxy and doubles the interval up to the maximum.
CHECK_DEVICES_EVERY_S, MAX_CHECK_DEVICES_EVERY_S = 3.0, 60.0


class NodeLock:
    """A lock that only one of several agents on a node can hold. ``acquire`` does not wait.

    The lock is on the kubelet's directory itself, because a kubelet that starts removes all files
    in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None

    def acquire(self) -> bool:
        """Try to take the lock, and return whether this agent holds it."""
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
    has changed. ``promotes`` returns whether the kubelet returns to the plugin by itself when the
    proxy ends. With such a kubelet, no socket may be registered twice. ``may_choose`` returns
    whether the plugin may choose devices for a moment.
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
        may_choose: Callable[[], bool | None],
        monotonic: Callable[[], float] = time.monotonic,
        patience: Patience = PATIENCE,
        check_every_s: float = CHECK_EVERY_S,
        check_devices_every_s: float = CHECK_DEVICES_EVERY_S,
    ) -> None:
        self._patience, self._check_every_s = patience, check_every_s
        self._first_check_devices_s = check_devices_every_s
        self.resource = resource
        self._folder = folder
        self._lock_on_node = lock
        self._plugin = plugin_socket(resource)
        self._choose = choose
        self._healthy = healthy
        self._changed = changed
        self._promotes = promotes
        self._may_choose = may_choose
        self._monotonic = monotonic
        self._proxy: PluginProxy | None = None
        #: Identities of the plugin's and the kubelet's socket at the last check. None requests a
        #: new registration.
        self._seen: tuple[tuple[int, int], tuple[int, int]] | None = None
        #: Whether the kubelet may still have the stream of an outdated registration.
        self._outdated = False
        #: Time at which a registration became due.
        self._due_since_s = 0.0
        #: Time at which this registration was done, or None if it was not done yet.
        self._registered_at_s: float | None = None
        #: Whether the plugin has been registered since the registration became due, so that the
        #: kubelet gets its list.
        self._listed = False
        #: Earliest time of the next registration.
        self._retry_at_s = 0.0
        #: When the agent next checks whether the kubelet has healthy devices.
        self._check_devices_at_s = 0.0
        #: Seconds between this check and the next one.
        self._check_devices_every_s = check_devices_every_s
        #: Why the kubelet does not call the proxy. Empty if the kubelet calls the proxy, or will
        #: call it soon.
        self.trouble = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def steers(self) -> bool:
        """Whether it is certain that the proxy is the kubelet's current endpoint."""
        proxy = self._proxy
        return (
            proxy is not None
            and proxy.watched
            and self._registered_at_s is not None
            and not self._end.is_set()
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the proxy has stopped answering the kubelet's calls."""
        return self._proxy is not None and self._proxy.is_stuck

    @property
    def is_answering(self) -> bool:
        """Whether a pod is waiting for a response of the proxy."""
        return self._proxy is not None and self._proxy.is_answering

    def take_passed(self, replicas: tuple[str, ...]) -> bool:
        """Do the same as ``PluginProxy.take_passed``. Return False while there is no proxy."""
        return self._proxy is not None and self._proxy.take_passed(replicas)

    def bypassed(self) -> None:
        """Request a new registration, because a container got a device without the proxy."""
        _log.warning("steering_bypassed", resource=self.resource)
        self._seen = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, bring_plugin_back: bool = True) -> None:
        """Return the resource to its plugin, or leave it without replicas.

        In the second case a socket stays, which shows the next agent that it must register the
        plugin.
        """
        self._end.set()
        self._thread.join()
        if self._proxy is None:
            return
        self._proxy.stop()
        if self._promotes() or self._keeps_devices_of_new_kubelet():
            return
        if bring_plugin_back:
            bring_back(self._folder, self._plugin, self._healthy, self._patience)
        else:
            leave_socket(self._folder / socket_of(self._plugin))

    def _keeps_devices_of_new_kubelet(self) -> bool:
        """Return whether the kubelet, whose version may be unknown, uses the plugin without the
        proxy.

        An older kubelet considers all devices gone when the proxy ends.
        """
        if not is_new(self._folder / "kubelet.sock"):
            return False
        wait_until(lambda: self._healthy(self.resource) is False, self._patience.notice_s)
        return self._healthy(self.resource) is True

    def update(self) -> None:
        """Create the proxy if it does not listen, and register it if a registration is due."""
        plugin = identity(self._folder / self._plugin)
        kubelet = identity(self._folder / "kubelet.sock")
        now_s = self._monotonic()
        if plugin is None or kubelet is None or not self._lock_on_node.acquire():
            self._seen = self._registered_at_s = None
            missing = self._plugin if plugin is None else "kubelet.sock"
            is_missing = plugin is None or kubelet is None
            self.trouble = (
                f"there is no socket {missing}"
                if is_missing
                else "another agent on the node steers the resource"
            )
            return
        lost = self._registered_at_s is not None and self._has_lost_devices(now_s)
        if self._proxy is None or not self._proxy.listening or lost:
            if self._proxy is not None:
                self._end_proxy(self._proxy, now_s)
            self._proxy = PluginProxy(self._folder, self._plugin, self._choose)
            remove_proxies(self._folder, self._plugin, but=self._proxy.endpoint)
            self._seen = None
        if (plugin, kubelet) != self._seen:
            self._outdated = self._seen is not None
            self._seen = plugin, kubelet
            self._is_due(now_s)
        elif (
            self._registered_at_s is not None
            and not self._proxy.watched
            # The kubelet opens the stream just after the registration.
            and now_s - self._registered_at_s >= RETRY_S
        ):
            self._is_due(now_s)
        if self._registered_at_s is None and now_s >= self._retry_at_s:
            self._register_if_ready(self._proxy, max(plugin[1], kubelet[1]) / 1e9, now_s)

    def _has_lost_devices(self, now_s: float) -> bool:
        """Check from time to time whether the kubelet has no healthy device of the resource.

        The kubelet drops all devices if a stream ends. The sockets do not show this, and only new
        registrations bring the devices back. If all devices are really unhealthy, new registrations
        do no harm.
        """
        if now_s < self._check_devices_at_s:
            return False
        lost = self._healthy(self.resource) is False
        if lost:
            _log.warning("steered_devices_lost", resource=self.resource)
        self._check_devices_every_s = (
            min(2 * self._check_devices_every_s, MAX_CHECK_DEVICES_EVERY_S)
            if lost
            else self._first_check_devices_s
        )
        self._check_devices_at_s = now_s + self._check_devices_every_s
        return lost

    def _end_proxy(self, proxy: PluginProxy, now_s: float) -> None:
        """Stop a proxy, and wait at most ``notice_s`` until the kubelet has noticed its end.

        If the next proxy were registered earlier, the kubelet would drop it.
        """
        had_stream = proxy.watched
        proxy.stop()
        if had_stream and not self._promotes():
            wait_until(lambda: self._healthy(self.resource) is False, self._patience.notice_s)
            self._retry_at_s = now_s + RETRY_S

    def _is_due(self, now_s: float) -> None:
        """Record that the proxy must be registered again."""
        self._due_since_s, self._registered_at_s, self._listed = now_s, None, False

    def _register_if_ready(self, proxy: PluginProxy, created_s: float, now_s: float) -> None:
        """Register the proxy if the kubelet has a list from the plugin. Otherwise register the
        plugin if needed.

        ``created_s`` is the Unix time at which the newer of the two sockets was created.
        """
        healthy = self._healthy(self.resource)
        waits_for_end = self._outdated and proxy.watched
        waited_s = now_s - self._due_since_s
        if healthy is not True or waits_for_end:
            is_new = waited_s < SETTLED_S and time.time() - created_s < SETTLED_S
            if is_new or (self._listed and waited_s < SETTLED_S):
                return
        if healthy is None:
            self._failed("the kubelet's PodResources service does not list the devices")
            return
        if healthy is False and not self._listed and not self._promotes():
            may = self._may_choose()
            if not may and (may is None or waited_s < DECIDED_S):
                self._failed("unconfirmed pods are bound for the GPU that an agent would choose")
                self._retry_at_s = now_s + RETRY_S
            elif self._register(self._plugin, now_s):
                self._due_since_s, self._listed = now_s, True
            return
        proxy.rename()
        if self._register(proxy.endpoint, now_s):
            self._registered_at_s, self._outdated = now_s, False
            self._check_devices_at_s = now_s + self._check_devices_every_s
            _log.info("steering_registered", resource=self.resource)

    def _register(self, endpoint: str, now_s: float) -> bool:
        """Register a socket, and return whether it succeeded. If it failed, ``trouble`` contains
        the reason."""
        self._retry_at_s = now_s + RETRY_S
        try:
            options = options_of(self._folder, self._plugin)
            if asks_for_preference(options):
                register(self._folder, endpoint, self.resource, options)
                self.trouble, self._retry_at_s = "", 0.0
                return True
            self._failed("the device plugin does not support GetPreferredAllocation")
        except grpc.RpcError as err:
            self._failed(status(err))
        except BadMessage:
            self._failed("the device plugin's options cannot be read")
        return False

    def _failed(self, trouble: str) -> None:
        if trouble != self.trouble:
            _log.warning("steering_not_registered", resource=self.resource, reason=trouble)
            self.trouble = trouble

    def _run(self) -> None:
        steered = False
        while not self._end.wait(self._check_every_s):
            try:
                self.update()
            except Exception:  # noqa: BLE001 - without this thread the proxy would not register
                _log.exception("steering_broken", resource=self.resource)
            if self.steers != steered:
                steered = not steered
                self._changed()
