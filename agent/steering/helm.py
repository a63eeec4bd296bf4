"""Answers the kubelet for every steered resource: reads ledger, checkpoint and sample, and decides.

The kubelet admits one pod after the other and waits for the answer, however long it takes. So the
ledger is read anew each time: the promise to a pod was written before the pod was bound.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from agent.gate import LIMITS_UNKNOWN, limits
from agent.kubelet.checkpoint import BadCheckpoint, Entry, read_checkpoint
from agent.kubelet.podresources import PodResources, Unanswered
from agent.probes import HoldingReading, Reading, SteeredReading
from agent.publish import NotDelivered
from agent.steering.choice import NoRoom, choose
from agent.steering.keeper import Keeper, Seat, clean_up, leftovers
from agent.steering.messages import Wish
from agent.steering.relay import ANSWER_S, Refused
from contract.errors import BadReport
from contract.gpunode import GPUNode, GPUNodeStatus
from contract.kube import ObjectMeta

_log = structlog.get_logger()

T = TypeVar("T")

#: How long the kubelet is made to wait for the ledger, or for a first sample: within the time that
#: the relay gives.
PATIENCE_S = 0.8 * ANSWER_S
_RETRY_S = 0.2


class Ledger(Protocol):
    def gpunode(self) -> GPUNode | None:
        """Our own GPUNode, not from a cache. Raises ``NotDelivered`` and ``BadReport``."""
        ...


class Helm:
    """``sample`` is the newest one, None where it is not fresh; ``reserve_bytes`` what the node's
    annotation keeps free on every device, None where that is not known; ``changed`` is called when
    something is steered or is not any more."""

    def __init__(
        self,
        resources: Sequence[str],
        checkpoint: Path,
        pod_resources: Path,
        ledger: Ledger,
        sample: Callable[[], GPUNodeStatus | None],
        reserve_bytes: Callable[[], int | None],
        changed: Callable[[], object],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._checkpoint = checkpoint
        self._kubelet = PodResources(str(pod_resources))
        self._ledger = ledger
        self._sample = sample
        self._reserve_bytes = reserve_bytes
        self._seat = Seat(checkpoint.parent)
        self._keepers = [
            Keeper(
                checkpoint.parent,
                self._seat,
                resource,
                self._chooser(resource),
                self._healthy,
                changed,
            )
            for resource in resources
        ]
        #: Resource -> who held what when it was last looked, since we steer it.
        self._held: dict[str, set[tuple[str, str, str]]] = {}
        self._leaving = False
        #: (resource, how it went) -> how often.
        self.answers = Counter[tuple[str, str]]()

    def start(self) -> None:
        for keeper in self._keepers:
            keeper.start()

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """What is steered now; who got a device without us is noticed here."""
        for keeper in self._keepers:
            held = {
                (r.uid, r.container, r.replica)
                for r in readings
                if isinstance(r, HoldingReading) and r.resource == keeper.resource and r.uid
            }
            steers = keeper.steers
            before = self._held.pop(keeper.resource, None)
            # All of them, so that none is counted later for somebody else.
            unknown = [
                each for each in held - (before or set()) if not keeper.take_passed(each[2:])
            ]
            if steers and before is not None and unknown:
                keeper.bypassed()
                steers = False
            if steers:
                self._held[keeper.resource] = held
                if not self._leaving:
                    yield SteeredReading(keeper.resource)

    @property
    def is_stuck(self) -> bool:
        """Whether the kubelet's calls are not answered any more."""
        return any(keeper.is_stuck for keeper in self._keepers)

    def leave(self) -> None:
        """Say from now on that nothing is steered, while every pod is still answered for."""
        self._leaving = True

    @property
    def may_leave(self) -> bool:
        """Whether the plugin may choose again."""
        return may_choose_again(self._ledger)

    def stop(self, bring_back: bool = True) -> None:
        """Give every resource back to its plugin, or leave it without replicas."""
        for keeper in self._keepers:
            keeper.stop(bring_back)
        self._seat.leave()
        self._kubelet.close()

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
        found = choose(wish, resource, node.spec, sample, entries, known, steered)
        took_ms = round((time.monotonic() - began_s) * 1000)
        if isinstance(found, NoRoom):
            self.answers[resource, "refused"] += 1
            _log.warning("steering_refused", resource=resource, asked_bytes=found.asked_bytes)
            raise Refused("Headroom: no GPU of this node has room for a pod on its way to it")
        result = "plugin" if not found.replicas else "stranger" if not found.awaited else "promised"
        if found.promised and found.device != found.promised:
            result = "elsewhere"
        self.answers[resource, result] += 1
        _log.info(
            "steered",
            resource=resource,
            device=found.device,
            promised=found.promised,
            awaited=found.awaited,
            result=result,
            took_ms=took_ms,
        )
        return found.replicas or None

    def _soon(self, read: Callable[[], T | None], why_not: str) -> T:
        deadline_s = time.monotonic() + self._patience_s
        while (found := read()) is None:
            if time.monotonic() >= deadline_s:
                raise Refused(f"Headroom: {why_not}")
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


class Withdrawal:
    """Brings the plugins back for an agent that was killed or ended too early, if this one does not
    steer. The resource has no replicas until then."""

    def __init__(self, checkpoint: Path, pod_resources: Path, ledger: Ledger) -> None:
        self._checkpoint = checkpoint
        self._pod_resources = pod_resources
        self._ledger = ledger
        self._is_due = bool(leftovers(checkpoint.parent))

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        if self._is_due and may_choose_again(self._ledger):
            tidy(self._checkpoint, self._pod_resources)
            self._is_due = False
        return ()


def may_choose_again(ledger: Ledger) -> bool:
    """Whether the plugin may choose: the GPUNode says that nothing is steered, and no pod that has
    not arrived is charged on one device because an agent would have chosen that.

    Before, the plugin could choose a device on which nothing is reserved for the pod.
    """
    try:
        node = ledger.gpunode()
    except (NotDelivered, BadReport):
        return False
    if node is None or node.status is None:
        return True
    seen = {row.uid for row in node.status.pods}
    return not node.status.plugin.steered and all(
        uid in seen or not any(charge.choice for charge in promise.charges)
        for uid, promise in node.spec.reservations.items()
    )


def healthy(kubelet: PodResources, resource: str) -> bool | None:
    """Whether the kubelet has healthy devices of the resource; None where it does not tell."""
    try:
        return bool(kubelet.healthy().get(resource))
    except Unanswered:
        return None


def tidy(checkpoint: Path, pod_resources: Path) -> None:
    """Undo what an agent left that was killed or ended too early."""
    kubelet = PodResources(str(pod_resources))
    clean_up(checkpoint.parent, lambda resource: healthy(kubelet, resource))
    kubelet.close()
