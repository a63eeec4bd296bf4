"""Which pods have to leave a device that has no room for all that sit there.

Where every promise was kept nobody has to. But the plugin may have chosen otherwise than could be
foreseen, or a stranger may have come. Then the memory of a device is *overfull*:

    sum over pods that sit there: max(requested, measured) + strays + unowned > allocatable

and the agent lets no gated pod start on it, as on one that is unhealthy. Whoever has not begun and
has a controller that makes another one in its stead can leave; the newest first, since the others
were there before it, and only as many as it takes. Pods that are going already are as good as gone.
Those that were marked to leave stay so for as long as it takes them.

To mark more than one at a time could send away two that are in each other's way, where one of them
would do.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from contract.reasons import Reason
from extender.placement.device_accounting import DeviceTerms
from extender.placement.occupancy import Holder


@dataclass(frozen=True, slots=True)
class Idle:
    """A pod that has not begun: it waits at its gate, or uses no memory yet."""

    #: When its promise was made (RFC 3339): who came last.
    since: str
    gated: bool
    #: Whether a controller makes another one when it is evicted.
    replaced: bool
    #: Whether the ledger says already that it is to leave.
    marked: bool


@dataclass(frozen=True, slots=True)
class Misplaced:
    #: Uids of pods that are to leave the node.
    leave: frozenset[str] = frozenset()
    #: Of those that are told no at their gate and have no controller: evicted they were lost.
    stuck: frozenset[str] = frozenset()


def overfull(devices: Iterable[DeviceTerms]) -> bool:
    """Whether some device has no room for all that sit there, or is no device to start on."""
    return any(
        terms.reservation_bytes
        and (
            _excess_bytes(terms, _sitting(terms)) > 0
            or terms.health_issue is Reason.UNHEALTHY_DEVICE
        )
        for terms in devices
    )


def misplaced(
    devices: Sequence[DeviceTerms], idle: Mapping[str, Idle], leaving: Set[str], may_mark: bool
) -> Misplaced:
    """Say who has to leave the node.

    ``leaving`` are the uids of pods that are ending or have ended; ``may_mark``: whether one more
    may be sent away now.
    """
    leave: set[str] = set()
    stuck: set[str] = set()
    for terms in devices:
        if not terms.believed:
            continue  # nobody starts there, and nobody knows whether there is room
        sick = terms.health_issue is Reason.UNHEALTHY_DEVICE
        sitting = [holder for holder in _sitting(terms) if holder.uid not in leaving | leave]
        excess_bytes = _excess_bytes(terms, sitting)
        for holder in sorted(sitting, key=lambda h: _turn(h, idle), reverse=True):
            pod = idle.get(holder.uid)
            if pod is None or not (excess_bytes > 0 or (sick and pod.gated)):
                continue
            if not pod.replaced:
                if pod.gated:
                    stuck.add(holder.uid)
            elif pod.marked or may_mark:
                may_mark = may_mark and pod.marked
                leave.add(holder.uid)
                excess_bytes -= holder.charged_bytes
    return Misplaced(frozenset(leave), frozenset(stuck))


def _turn(holder: Holder, idle: Mapping[str, Idle]) -> tuple[bool, str, str]:
    pod = idle.get(holder.uid)
    return (pod.marked, pod.since, holder.uid) if pod else (False, "", "")


def _sitting(terms: DeviceTerms) -> list[Holder]:
    return [holder for holder in terms.holders if holder.observed]


def _excess_bytes(terms: DeviceTerms, sitting: Iterable[Holder]) -> int:
    charged_bytes = sum(holder.charged_bytes for holder in sitting)
    return (
        charged_bytes
        + terms.unobserved_pods_bytes
        + terms.unattributed_bytes
        - terms.allocatable_bytes
    )
