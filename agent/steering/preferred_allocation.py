"""Answers the kubelet's GetPreferredAllocation calls for every steered resource.

The response follows the ledger, the checkpoint and the sample. The kubelet admits one pod at a time
and waits for the response without a timeout. The extender writes a reservation before it binds the
pod, so a read of the ledger after the kubelet's request includes the reservation of this pod.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from agent.gate_decision import LIMITS_UNKNOWN, limits
from agent.kube_publisher import KubernetesPublisher, NotDelivered
from agent.probes.checkpoint import BadCheckpoint, Entry, read_checkpoint
from agent.probes.host_processes import identity
from agent.probes.podresources import PodResources, Unanswered
from agent.probes.readings import (
    HoldingReading,
    ObstacleReading,
    PermissionReading,
    Reading,
    SteeredReading,
)
from agent.steering.choice import Eligibility, NoRoom, OnlyCordoned, choose, eligibility
from agent.steering.leaving import may_choose_again
from agent.steering.messages import ContainerRequest
from agent.steering.plugin_proxy import ANSWER_S, Rejected
from agent.steering.plugin_registration import NodeLock, PluginRegistration
from agent.steering.plugin_return import leftovers, proxies, resource_of, restore
from headroom.contract.annotations import DeviceChoice
from headroom.contract.device_choice import minor_version, why_kubelet_not_steered
from headroom.contract.errors import BadReport
from headroom.contract.gpunode import GPUNode, GPUNodeStatus
from headroom.contract.kube import ObjectMeta

_log = structlog.get_logger()

T = TypeVar("T")

#: Maximum number of seconds that one call waits until its inputs (sample, ledger, checkpoint and
#: limits) can be read. After ``ANSWER_S`` the plugin proxy would end the call without the reason.
PATIENCE_S = 0.8 * ANSWER_S
#: The API server gets at least this number of seconds to answer, even if other inputs have used up
#: the time.
_LEAST_READ_S = 0.1
_RETRY_S = 0.2
#: Seconds between two checks whether a response is still due.
_YIELD_S = 0.01
#: Maximum number of remembered pods, which is the maximum number of reservations of a GPUNode.
MAX_ARRIVALS = 4096
#: When the agent stops, it takes at most this number of seconds to return all resources to their
#: plugins.
RETURN_WITHIN_S = 7.0


class Arrivals:
    """Remembers the uids of pods that have had devices since the kubelet started.

    If such a pod has no devices, it has ended and is not unconfirmed, although its reservation may
    still exist. The uids are forgotten when the kubelet restarts, because it may admit a pod again.
    """

    def __init__(self, kubelet: Path) -> None:
        self._kubelet = kubelet
        self._since: object = None
        self._lock = threading.Lock()
        self._uids: dict[str, None] = {}

    def see(self, uids: Iterable[str]) -> Set[str]:
        """Add uids, and return all remembered uids."""
        with self._lock:
            if (since := identity(self._kubelet)) != self._since:
                self._since, self._uids = since, {}
            self._uids |= dict.fromkeys(uids)
            for oldest in list(self._uids)[: max(0, len(self._uids) - MAX_ARRIVALS)]:
                del self._uids[oldest]
            return frozenset(self._uids)


class PreferredAllocation:
    """Steers the shared resources of the node while its device choice is ``steered``.

    ``ledger`` reads the GPUNode. ``sample`` returns the newest sample, or None if it is stale.
    ``reserve_bytes`` returns the memory that the node's annotation keeps free on every device, or
    None if it is unknown. ``mode`` returns the node's device choice, or None if it is unknown.
    ``kubelet_version`` returns the version in the Node's status, which is empty if unknown.
    ``changed`` requests a sample, because the set of steered resources has changed.
    """

    def __init__(
        self,
        checkpoint: Path,
        pod_resources: Path,
        ledger: KubernetesPublisher,
        sample: Callable[[], GPUNodeStatus | None],
        reserve_bytes: Callable[[], int | None],
        mode: Callable[[], DeviceChoice | None],
        kubelet_version: Callable[[], str],
        changed: Callable[[], object],
        patience_s: float | None = None,
    ) -> None:
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._checkpoint = checkpoint
        self._folder = checkpoint.parent
        self._kubelet = PodResources(str(pod_resources))
        self._ledger = ledger
        self._sample = sample
        self._reserve_bytes = reserve_bytes
        self._mode = mode
        self._kubelet_version = kubelet_version
        self._changed = changed
        self._lock_on_node = NodeLock(self._folder)
        self._registrations: dict[str, PluginRegistration] = {}
        #: Resources that are being returned to the plugin. The value is None while reservations of
        #: unconfirmed pods depend on the agent's choice. After that it is the thread that returns
        #: the resource.
        self._returning: dict[str, threading.Thread | None] = {}
        #: The sockets of each plugin that a killed agent left, and the thread that restores the
        #: plugin.
        self._restored: dict[str, tuple[set[str], threading.Thread]] = {}
        #: For each resource, (pod uid, container, replica) of all samples since the agent began to
        #: steer it, newest last. A sample can omit a pod that a later sample shows again.
        self._held: dict[str, dict[tuple[str, str, str], None]] = {}
        self._arrivals = Arrivals(self._folder / "kubelet.sock")
        self._leaving = False
        #: Number of responses by (resource, result).
        self.answers = Counter[tuple[str, str]]()

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Start or stop steering as the device choice requires, and report the steered resources.

        Return a reading for each steered resource, for each reason why the device choice has no
        effect, and for the permission to steer. If a container got a replica without the agent, its
        resource is not steered until the proxy has registered again.
        """
        obstacles = [] if self._leaving else self._adjust()
        if (sample := self._sample()) is not None:
            self._arrivals.see(row.uid for row in sample.pods if row.replica)
        for resource, registration in self._registrations.items():
            held = {
                (r.uid, r.container, r.replica)
                for r in readings
                if isinstance(r, HoldingReading) and r.resource == resource and r.uid
            }
            steers = registration.steers
            before = self._held.pop(resource, None)
            # Check all of them, so that no recorded allocation is matched with a later container.
            new = held - (before or {}).keys()
            unknown = [each for each in new if not registration.take_passed(each[2:])]
            if steers and before is not None and unknown:
                registration.bypassed()
                steers = False
            if steers:
                earlier = {each: None for each in before or () if each not in held}
                seen = earlier | dict.fromkeys(held)
                self._held[resource] = dict(list(seen.items())[-MAX_ARRIVALS:])
                if not self._leaving and resource not in self._returning:
                    yield SteeredReading(resource)
        for obstacle in obstacles:
            yield ObstacleReading(obstacle)
        yield PermissionReading(self._permitted)

    @property
    def is_stuck(self) -> bool:
        """Whether the agent has stopped answering the kubelet's calls."""
        return any(registration.is_stuck for registration in list(self._registrations.values()))

    def yield_to_answers(self) -> None:
        """Wait while a pod waits for a response, at most ``ANSWER_S`` seconds.

        On a node with busy CPUs, a sample could otherwise delay the response.
        """
        until_s = time.monotonic() + ANSWER_S
        while (
            any(registration.is_answering for registration in list(self._registrations.values()))
            and time.monotonic() < until_s
        ):
            time.sleep(_YIELD_S)

    @property
    def has_resources(self) -> bool:
        """Whether the kubelet may call the agent for any resource."""
        return bool(self._registrations)

    def leave(self) -> None:
        """Report from now on that no resource is steered, but keep answering the kubelet."""
        self._leaving = True

    @property
    def may_leave(self) -> bool | None:
        """Whether the plugins may choose again for all resources (see ``may_choose_again``)."""
        return self._may_choose_again()

    def stop(self, bring_back: bool = True) -> None:
        """Stop steering. Return every resource to its plugin, or leave it without replicas."""
        threads = [
            self._returning.get(resource)
            or _started(threading.Thread(target=registration.stop, args=(bring_back,), daemon=True))
            for resource, registration in self._registrations.items()
        ]
        until_s = time.monotonic() + RETURN_WITHIN_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._lock_on_node.release()
        self._kubelet.close()

    @property
    def _permitted(self) -> bool:
        return os.access(self._folder, os.W_OK)

    def _adjust(self) -> list[str]:
        """Start and stop steering according to the mode, and return the reasons that prevent it."""
        mode, sample = self._mode(), self._sample()
        for resource, thread in list(self._returning.items()):
            if thread is not None and not thread.is_alive():
                del self._returning[resource], self._registrations[resource]
        if not (
            self._registrations or any(thread.is_alive() for _, thread in self._restored.values())
        ):
            self._lock_on_node.release()
        if mode is None:
            return []
        found = Eligibility()
        if mode is DeviceChoice.STEERED and sample is not None:
            found = eligibility(sample, self._permitted, self._kubelet_version())
        for resource, registration in self._registrations.items():
            if mode is not DeviceChoice.STEERED or resource in found.excluded:
                self._give_back(resource, registration)
            elif resource in self._returning and self._returning[resource] is None:
                del self._returning[resource]
        restoring = {
            resource_of(plugin)
            for plugin, (_, thread) in self._restored.items()
            if thread.is_alive()
        }
        # A resource that is being restored must wait, because both threads would register the
        # plugin and remove the sockets of proxies.
        for resource in sorted(found.resources - self._registrations.keys() - restoring):
            self._registrations[resource] = PluginRegistration(
                self._folder,
                self._lock_on_node,
                resource,
                partial(self._choose, resource),
                self._healthy,
                self._changed,
                self._promotes,
                partial(self._may_choose_again, resource),
            )
            self._registrations[resource].start()
            _log.info("steering_begins", resource=resource)
        self._restore()
        troubles = [
            f"{resource}: {registration.trouble}"
            for resource, registration in sorted(self._registrations.items())
            if registration.trouble and resource not in self._returning
        ]
        return [*found.obstacles, *troubles]

    def _give_back(self, resource: str, registration: PluginRegistration) -> None:
        """Report that the resource is no longer steered, and return it to the plugin as soon as no
        reservation of an unconfirmed pod depends on the agent's choice."""
        if resource not in self._returning:
            self._returning[resource] = None
            _log.info("steering_ends", resource=resource)
            self._changed()  # The next sample may show that no pod is unconfirmed.
        elif self._returning[resource] is None and self._may_choose_again(resource):
            thread = threading.Thread(target=registration.stop, name="return", daemon=True)
            self._returning[resource] = thread
            thread.start()

    def _restore(self) -> None:
        """Register the plugins that an agent left unregistered when it was killed.

        This is not done while the version of the kubelet is unknown, because a second registration
        harms newer kubelets.
        """
        if minor_version(self._kubelet_version()) is None:
            return
        for plugin in leftovers(self._folder):
            resource = resource_of(plugin)
            sockets = proxies(self._folder, plugin)
            last, _ = self._restored.get(plugin, (None, None))
            if resource in self._registrations or sockets == last:
                continue
            if not (self._may_choose_again(resource) and self._lock_on_node.acquire()):
                continue
            thread = threading.Thread(
                target=restore,
                args=(self._folder, plugin, self._healthy, self._promotes()),
                daemon=True,
            )
            self._restored[plugin] = (sockets, thread)
            thread.start()

    def _may_choose_again(self, resource: str = "") -> bool | None:
        return may_choose_again(self._ledger, resource, self._arrivals.see(()))

    def _promotes(self) -> bool:
        """Return whether the kubelet returns to the plugin by itself when the proxy ends."""
        return why_kubelet_not_steered(self._kubelet_version()) != ""

    def _choose(self, resource: str, request: ContainerRequest) -> Sequence[str] | None:
        """Return the replicas for a container, or None if the plugin should choose.

        Raises ``Rejected``.
        """
        until_s = time.monotonic() + self._patience_s
        soon = partial(_soon, until_s)
        sample = soon(self._sample, "no fresh sample of the devices")
        if not any(
            device.resource == resource and device.sharing != "none" for device in sample.devices
        ):
            return None  # Unshared devices are not steered. The extender uses the same rule.
        node = soon(partial(self._read_ledger, until_s), "the ledger cannot be read")
        steered = node.status is not None and resource in node.status.plugin.steered
        entries = soon(self._read_checkpoint, "the kubelet's checkpoint cannot be read")
        known = soon(lambda: limits(self._reserve_bytes()), LIMITS_UNKNOWN)
        arrived = self._arrivals.see(entry.pod_uid for entry in entries)
        found = choose(request, resource, node.spec, sample, entries, known, steered, arrived)
        if isinstance(found, NoRoom):
            self.answers[resource, "rejected"] += 1
            _log.warning("steering_rejected", resource=resource, asked_bytes=found.asked_bytes)
            raise Rejected(
                "Headroom: no GPU of this node has enough free memory for a pod bound to the node"
            )
        if isinstance(found, OnlyCordoned):
            self.answers[resource, "rejected"] += 1
            _log.warning("steering_rejected", resource=resource, reason="only cordoned GPUs")
            raise Rejected(
                "Headroom: only cordoned GPUs of this node have enough free replicas. To allow new "
                "pods there, run: kubectl headroom uncordon NODE GPU"
            )
        if found.reserved and not found.reserved.issuperset(found.devices):
            result = "elsewhere"
        elif not found.replicas:
            result = "plugin"
        else:
            result = "reserved" if found.unconfirmed else "unreserved"
        self.answers[resource, result] += 1
        _log.info(
            "steered",
            resource=resource,
            devices=",".join(found.devices),
            reserved=",".join(sorted(found.reserved)),
            unconfirmed=found.unconfirmed,
            result=result,
        )
        return found.replicas or None

    def _read_ledger(self, until_s: float) -> GPUNode | None:
        within_s = max(_LEAST_READ_S, until_s - time.monotonic())
        try:
            return self._ledger.gpunode(within_s) or GPUNode(metadata=ObjectMeta())
        except (NotDelivered, BadReport) as err:
            _log.warning("ledger_not_read", reason=str(err))
            return None

    def _read_checkpoint(self) -> tuple[Entry, ...] | None:
        try:
            return read_checkpoint(self._checkpoint).entries
        except FileNotFoundError:
            return ()  # No device has ever been allocated.
        except (BadCheckpoint, OSError):
            return None

    def _healthy(self, resource: str) -> bool | None:
        """Return whether the kubelet has healthy devices of the resource, or None if unknown."""
        try:
            return bool(self._kubelet.healthy().get(resource))
        except Unanswered:
            return None


def _started(thread: threading.Thread) -> threading.Thread:
    thread.start()
    return thread


def _soon(until_s: float, read: Callable[[], T | None], why_not: str) -> T:
    """Call ``read`` until its result is not None, and return the result.

    Raises ``Rejected`` with ``why_not`` after ``until_s`` on the monotonic clock.
    """
    while (found := read()) is None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise Rejected(f"Headroom: {why_not}")
        time.sleep(min(_RETRY_S, left_s))
    return found
