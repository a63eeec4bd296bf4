"""Stops an agent that steers, and returns the resources to their plugins when that is safe.

It is safe if the GPUNode reports that nothing is steered, and if no reservation of an unconfirmed
pod depends on the agent's choice. If the ledger cannot be read, because the API server is down or
the agent's permission was deleted first, the agent stops writing and waits until its report is
stale. From then on no extender binds a pod to the node. Until then the agent rejects all pods.
"""

import time
from collections.abc import Callable, Set
from typing import Protocol

import structlog

from agent.kube_publisher import KubernetesPublisher, NotDelivered
from headroom.contract.errors import BadReport

_log = structlog.get_logger()

#: An agent that stops keeps steering for at most this number of seconds while reservations of
#: unconfirmed pods depend on its choice.
CONFIRM_WITHIN_S = 6.0
#: Additional seconds for binds that are in progress when the agent becomes stale.
BIND_S = 15.0
_RETRY_S = 1.0


class Allocation(Protocol):
    """The part of ``PreferredAllocation`` that is needed to stop steering."""

    @property
    def has_resources(self) -> bool: ...

    @property
    def may_leave(self) -> bool | None: ...

    def leave(self) -> None: ...

    def stop(self, bring_back: bool = True) -> None: ...


def leave(
    allocation: Allocation,
    report: Callable[[], object],
    pause_s: float,
    stale_after_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Stop steering, and return when every resource is back at its plugin or has no replicas.

    ``report`` takes and writes a sample, at most once per ``pause_s`` seconds. No extender uses the
    node when ``stale_after_s`` seconds have passed since the agent's last write. If a pod still
    depends on the agent's choice, the resources have no replicas until the next agent starts.
    """

    def confirmed() -> bool | None:
        """Report until the agent may leave, for at most ``CONFIRM_WITHIN_S`` seconds.

        Return None if the ledger cannot be read.
        """
        until_s = monotonic() + CONFIRM_WITHIN_S
        while not (may := allocation.may_leave) and monotonic() < until_s:
            report()
            sleep(pause_s)
        return may

    if not allocation.has_resources:
        allocation.stop()
        return
    allocation.leave()
    may = confirmed()
    if may is None:
        _log.warning("ledger_not_read", hint="waiting until extenders stop using this node")
        until_s = monotonic() + stale_after_s + BIND_S
        while (may := allocation.may_leave) is None and monotonic() < until_s:
            sleep(_RETRY_S)
        may = True if may is None else confirmed()
    if not may:
        why = "unconfirmed pods are reserved on the device that this agent would choose"
        _log.warning("plugin_not_brought_back", reason=why, hint="the next agent brings it back")
    allocation.stop(bool(may))


def may_choose_again(
    ledger: KubernetesPublisher, resource: str = "", arrived_before: Set[str] = frozenset()
) -> bool | None:
    """Return whether the plugin may choose the devices of ``resource`` (of all resources if empty).

    It may if the GPUNode reports that the resource is not steered, and if no unconfirmed pod has a
    reservation on the devices that an agent would choose. Otherwise the plugin could choose a
    device on which nothing is reserved for the pod. Return None if the GPUNode cannot be read.
    ``arrived_before`` contains uids of pods that have had devices. They are confirmed or have
    ended.
    """
    try:
        node = ledger.gpunode()
    except (NotDelivered, BadReport):
        return None
    if node is None or node.status is None:
        return True
    confirmed = {row.uid for row in node.status.pods} | arrived_before
    steered = set(node.status.plugin.steered)
    chosen = {
        charge.resource
        for uid, reservation in node.spec.reservations.items()
        if uid not in confirmed
        for charge in reservation.charges
        if charge.choices
    }
    return not ({resource} & (steered | chosen) if resource else steered | chosen)
