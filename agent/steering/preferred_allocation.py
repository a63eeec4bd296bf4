"""Answers the kubelet for every steered resource: reads ledger, checkpoint and sample, and decides.

The kubelet admits one pod after the other and waits for the answer, however long it takes. So the
ledger is read anew each time: the promise to a pod was written before the pod was bound.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from agent.gate_decision import LIMITS_UNKNOWN, limits
from agent.probes.kubelet.checkpoint import BadCheckpoint, Entry, read_checkpoint
from agent.probes.kubelet.podresources import PodResources, Unanswered
from agent.probes.readings import HoldingReading, ObstacleReading, Reading, SteeredReading
from agent.status.writer import NotDelivered
from agent.steering.choice import NoRoom, choose
from agent.steering.eligibility import Eligibility, eligibility
from agent.steering.messages import Wish
from agent.steering.plugin_proxy import ANSWER_S, PREFIX, Rejected, identity
from agent.steering.plugin_registration import (
    PluginRegistration,
    Seat,
    leftovers,
    resource_of,
    restore,
)
from contract.annotations import DeviceChoice
from contract.errors import BadReport
from contract.gpunode import GPUNode, GPUNodeStatus
from contract.kube import ObjectMeta

_log = structlog.get_logger()

T = TypeVar("T")

#: How long the kubelet is made to wait for the ledger, or for a first sample: within the time that
#: the relay gives.
PATIENCE_S = 0.8 * ANSWER_S
_RETRY_S = 0.2
#: Pods that are remembered, at most: as many as a GPUNode has reservations.
MAX_ARRIVALS = 4096
#: When the agent ends: how long giving a resource back, which has begun, may still take.
RETURN_WITHIN_S = 5.0


class Ledger(Protocol):
    def gpunode(self) -> GPUNode | None:
        """Our own GPUNode, not from a cache. Raises ``NotDelivered`` and ``BadReport``."""
        ...


class Arrivals:
    """Remembers the uids of pods that have had a device of this kubelet.

    A pod that has none any more has ended, though its reservation may not have been removed yet:
    it is not on its way. A kubelet that starts again may admit a pod once more.
    """

    def __init__(self, kubelet: Path) -> None:
        self._kubelet = kubelet
        self._since: object = None
        self._lock = threading.Lock()
        self._uids: dict[str, None] = {}

    def see(self, uids: Iterable[str]) -> Set[str]:
        """Add these; returns all that are remembered."""
        with self._lock:
            if (since := identity(self._kubelet)) != self._since:
                self._since, self._uids = since, {}
            self._uids |= dict.fromkeys(uids)
            for oldest in list(self._uids)[: max(0, len(self._uids) - MAX_ARRIVALS)]:
                del self._uids[oldest]
            return frozenset(self._uids)


class PreferredAllocation:
    """Steers the shared resources of the node while its mode is ``steered``.

    ``sample`` is the newest one, None if it is not fresh; ``reserve_bytes`` what the node's
    annotation keeps free on every device, None if that is not known; ``mode`` is the device choice
    that the node is to have, None if it is not known yet; ``changed`` is called when a sample is
    due because something is steered or is not any more.
    """

    def __init__(
        self,
        checkpoint: Path,
        pod_resources: Path,
        ledger: Ledger,
        sample: Callable[[], GPUNodeStatus | None],
        reserve_bytes: Callable[[], int | None],
        mode: Callable[[], DeviceChoice | None],
        changed: Callable[[], object],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._checkpoint = checkpoint
        self._folder = checkpoint.parent
        self._kubelet = PodResources(str(pod_resources))
        self._ledger = ledger
        self._sample = sample
        self._reserve_bytes = reserve_bytes
        self._mode = mode
        self._changed = changed
        self._seat = Seat(self._folder)
        self._registrations: dict[str, PluginRegistration] = {}
        #: Resources that are given back: None while pods on their way count on our choice, then
        #: what gives them back.
        self._returning: dict[str, threading.Thread | None] = {}
        #: Plugin -> the socket that an agent left in its place, and what brings it back.
        self._restored: dict[str, tuple[object, threading.Thread]] = {}
        #: Resource -> who held what when it was last looked, since we steer it.
        self._held: dict[str, set[tuple[str, str, str]]] = {}
        self._arrivals = Arrivals(self._folder / "kubelet.sock")
        self._leaving = False
        #: (resource, how it went) -> how often.
        self.answers = Counter[tuple[str, str]]()

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Report what is steered and what is in the way, and detect pods that bypassed the
        agent."""
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
            # All of them, so that none is counted later for somebody else.
            unknown = [
                each for each in held - (before or set()) if not registration.take_passed(each[2:])
            ]
            if steers and before is not None and unknown:
                registration.bypassed()
                steers = False
            if steers:
                self._held[resource] = held
                if not self._leaving and resource not in self._returning:
                    yield SteeredReading(resource)
        for obstacle in obstacles:
            yield ObstacleReading(obstacle)

    @property
    def is_stuck(self) -> bool:
        """Whether the kubelet's calls are not answered any more."""
        return any(registration.is_stuck for registration in list(self._registrations.values()))

    @property
    def has_resources(self) -> bool:
        """Whether the kubelet may ask us for any resource."""
        return bool(self._registrations)

    def leave(self) -> None:
        """Report from now on that nothing is steered, while every pod is still answered for."""
        self._leaving = True

    @property
    def may_leave(self) -> bool:
        """Whether the plugin may choose again."""
        return may_choose_again(self._ledger)

    def stop(self, bring_back: bool = True) -> None:
        """Give every resource back to its plugin, or leave it without replicas."""
        for resource, registration in self._registrations.items():
            if (thread := self._returning.get(resource)) is not None:
                thread.join(RETURN_WITHIN_S)
            else:
                registration.stop(bring_back)
        self._seat.leave()
        self._kubelet.close()

    def _adjust(self) -> list[str]:
        """Begin and end steering as the mode asks for; returns what is in the way of it."""
        mode, sample = self._mode(), self._sample()
        for resource, thread in list(self._returning.items()):
            if thread is not None and not thread.is_alive():
                del self._returning[resource], self._registrations[resource]
        if not (
            self._registrations or any(thread.is_alive() for _, thread in self._restored.values())
        ):
            self._seat.leave()
        if mode is None:
            return []
        found = Eligibility()
        if mode is DeviceChoice.STEERED and sample is not None:
            found = eligibility(sample, os.access(self._folder, os.W_OK))
        for resource, registration in self._registrations.items():
            if mode is not DeviceChoice.STEERED or resource in found.excluded:
                self._give_back(resource, registration)
            elif resource in self._returning and self._returning[resource] is None:
                del self._returning[resource]
        for resource in sorted(found.resources - self._registrations.keys()):
            self._registrations[resource] = PluginRegistration(
                self._folder,
                self._seat,
                resource,
                self._chooser(resource),
                self._healthy,
                self._changed,
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
        """Report first that the resource is not steered; once no pod on its way counts on our
        choice, let the plugin choose."""
        if resource not in self._returning:
            self._returning[resource] = None
            _log.info("steering_ends", resource=resource)
            self._changed()  # the next sample may find no pod on its way
        elif self._returning[resource] is None and may_choose_again(self._ledger, resource):
            thread = threading.Thread(target=registration.stop, name="return", daemon=True)
            self._returning[resource] = thread
            thread.start()

    def _restore(self) -> None:
        """Bring back the plugins whose place an agent took that did not live to give it back."""
        for plugin in leftovers(self._folder):
            resource = resource_of(plugin)
            socket = identity(self._folder / (PREFIX + plugin))
            last, _ = self._restored.get(plugin, (None, None))
            if resource in self._registrations or socket == last:
                continue
            if not (may_choose_again(self._ledger, resource) and self._seat.take()):
                continue
            thread = threading.Thread(
                target=restore, args=(self._folder, plugin, self._healthy), daemon=True
            )
            self._restored[plugin] = (socket, thread)
            thread.start()

    def _chooser(self, resource: str) -> Callable[[Wish], Sequence[str] | None]:
        return lambda wish: self._choose(resource, wish)

    def _choose(self, resource: str, wish: Wish) -> Sequence[str] | None:
        """Raises ``Refused``."""
        began_s = time.monotonic()
        sample = self._soon(self._sample, "no fresh sample of the devices")
        if not any(
            device.resource == resource and device.sharing != "none" for device in sample.devices
        ):
            return None  # elsewhere there is little to choose; the extender goes by the same rule
        node = self._soon(self._read_ledger, "the ledger cannot be read")
        steered = node.status is not None and resource in node.status.plugin.steered
        entries = self._soon(self._read_checkpoint, "the kubelet's checkpoint cannot be read")
        known = self._soon(lambda: limits(self._reserve_bytes()), LIMITS_UNKNOWN)
        arrived = self._arrivals.see(entry.pod_uid for entry in entries)
        found = choose(wish, resource, node.spec, sample, entries, known, steered, arrived)
        took_ms = round((time.monotonic() - began_s) * 1000)
        if isinstance(found, NoRoom):
            self.answers[resource, "rejected"] += 1
            _log.warning("steering_rejected", resource=resource, asked_bytes=found.asked_bytes)
            raise Rejected("Headroom: no GPU of this node has room for a pod on its way to it")
        result = "plugin" if not found.replicas else "stranger" if not found.awaited else "reserved"
        if found.reserved and found.device != found.reserved:
            result = "elsewhere"
        self.answers[resource, result] += 1
        _log.info(
            "steered",
            resource=resource,
            device=found.device,
            reserved=found.reserved,
            awaited=found.awaited,
            result=result,
            took_ms=took_ms,
        )
        return found.replicas or None

    def _soon(self, read: Callable[[], T | None], why_not: str) -> T:
        deadline_s = time.monotonic() + self._patience_s
        while (found := read()) is None:
            if time.monotonic() >= deadline_s:
                raise Rejected(f"Headroom: {why_not}")
            time.sleep(_RETRY_S)
        return found

    def _read_ledger(self) -> GPUNode | None:
        try:
            return self._ledger.gpunode() or GPUNode(metadata=ObjectMeta())
        except (NotDelivered, BadReport) as err:
            _log.warning("ledger_not_read", reason=str(err))
            return None

    def _read_checkpoint(self) -> tuple[Entry, ...] | None:
        try:
            return read_checkpoint(self._checkpoint).entries
        except FileNotFoundError:
            return ()  # nobody was ever given anything
        except (BadCheckpoint, OSError):
            return None

    def _healthy(self, resource: str) -> bool | None:
        return healthy(self._kubelet, resource)


def may_choose_again(ledger: Ledger, resource: str = "") -> bool:
    """Whether the plugin may choose: the GPUNode says that the resource (any, if none is named) is
    not steered, and no pod that has not arrived is charged on one device because an agent would
    have chosen that.

    Before, the plugin could choose a device on which nothing is reserved for the pod.
    """
    try:
        node = ledger.gpunode()
    except (NotDelivered, BadReport):
        return False
    if node is None or node.status is None:
        return True
    seen = {row.uid for row in node.status.pods}
    steered = set(node.status.plugin.steered)
    chosen = {
        charge.resource
        for uid, reservation in node.spec.reservations.items()
        if uid not in seen
        for charge in reservation.charges
        if charge.choice
    }
    return not ({resource} & (steered | chosen) if resource else steered | chosen)


def healthy(kubelet: PodResources, resource: str) -> bool | None:
    """Whether the kubelet has healthy devices of the resource; None where it does not tell."""
    try:
        return bool(kubelet.healthy().get(resource))
    except Unanswered:
        return None
