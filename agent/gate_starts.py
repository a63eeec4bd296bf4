"""Remembers the pods that start alone, from when their gate opens until their start has ended.

The phase in the ledger covers only the first start of a pod. The kubelet runs the gate again when
it restarts all containers of the pod. This happens after a reboot of the node, after the loss of
the sandbox, and for ``RestartAllContainers``. By then the phase is *running*, so only the agent
sees which pods of its node start again. If a single container restarts, the gate does not run and
no pod waits.

Such a pod is *starting* until one of these conditions holds:

* Its use has settled: each of its containers that holds a device has begun to use it since the gate
  opened, none of them is still loading, and at least one has settled (``agent.peaks``).
* Its timeout (``Reservation.start_timeout_s``) has passed since its gate opened. The agent still
  remembers the pod until it settles, so a pod that never settles delays other pods only once.
* Its first start has ended in the ledger.
* It no longer has a reservation.

A pod waits only for pods whose gate has opened, never for pods that still wait at their gate, so
pods cannot wait for each other. A repeated request has no effect, because any pod of the cluster
can send a request with any uid.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import structlog

from agent.gate_decision import Gates
from agent.probes.state_file import StateFile
from headroom.contract.gpunode import PodUse, Reservation

_log = structlog.get_logger()

#: A pod counts as waiting at its gate for this many seconds after its last request. The gate client
#: asks at least that often, even if a request times out.
AT_GATE_S = 20.0


class Opened(msgspec.Struct, frozen=True):
    """A pod whose gate has opened."""

    #: When the gate was opened, in seconds since boot.
    at_s: float
    #: Whether the ledger showed the pod as starting, so that this is its first start.
    is_first: bool
    #: (device, container, start time) of each container run that the report showed at that time.
    before: list[tuple[str, str, str]]


class OpenGates(msgspec.Struct):
    """The open gates, which an agent stores for the next agent on the node."""

    #: The opened gates by pod uid.
    opened: dict[str, Opened] = {}


class GateStarts:
    """The open gates of a node. The class is not thread-safe.

    They survive restarts of the agent in a file beside ``state``, the agent's state file. If
    ``state`` is None, they are not stored. ``boot_s`` returns the seconds since boot. Gates from
    before the last boot are ignored.
    """

    def __init__(
        self,
        state: Path | None,
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        path = state and state.with_suffix(".starts.json")
        self._file = StateFile(path, OpenGates(), "starts of pods that start alone")
        self._boot_s = boot_s
        now_s = boot_s()
        before = self._file.read().opened
        self._opened = {uid: opened for uid, opened in before.items() if opened.at_s <= now_s}
        #: Time of the last request of each pod at its gate, in seconds since boot, by uid.
        self._asked_s: dict[str, float] = {}
        self._logged = ""
        self._log_trouble()

    def ask(
        self, uid: str, reservations: Mapping[str, Reservation], rows: Iterable[PodUse]
    ) -> Gates:
        """Record the request of a pod, forget starts that have ended, and return the gates of the
        other pods.

        ``rows`` contains the rows of the newest sample.
        """
        now_s = self._boot_s()
        of_pod: dict[str, list[PodUse]] = {}
        for row in rows:
            of_pod.setdefault(row.uid, []).append(row)
        self._opened = {
            each: opened
            for each, opened in self._opened.items()
            if each in reservations
            and not (opened.is_first and not reservations[each].is_starting)
            and not _has_settled(opened, of_pod.get(each, ()))
        }
        self._asked_s = {
            each: at_s
            for each, at_s in (self._asked_s | {uid: now_s}).items()
            if each in reservations and now_s - at_s < AT_GATE_S
        }
        starting = {
            each
            for each, opened in self._opened.items()
            if now_s - opened.at_s < reservations[each].start_timeout_s
        }
        return Gates(starting, self._asked_s.keys())

    def open(self, uid: str, reservation: Reservation, rows: Iterable[PodUse]) -> None:
        """Remember that the pod's gate opens now, if the pod starts alone."""
        self._asked_s.pop(uid, None)
        if not reservation.starts_alone or uid in self._opened:
            return
        before = [_life(row) for row in rows if row.uid == uid and row.started_at]
        self._opened[uid] = Opened(self._boot_s(), reservation.is_starting, before)
        self._file.write(OpenGates(dict(self._opened)))
        self._log_trouble()

    def _log_trouble(self) -> None:
        if self._file.trouble and self._file.trouble != self._logged:
            _log.warning("starts_not_kept", reason=self._file.trouble)
        self._logged = self._file.trouble


def _has_settled(opened: Opened, rows: Iterable[PodUse]) -> bool:
    """Return whether the pod's rows show that its start behind this gate has ended."""
    rows = list(rows)
    began = [row for row in rows if row.started_at and _life(row) not in opened.before]
    for container in {row.container for row in rows if row.replica}:
        # A row without a container name counts for every container. It has no name because the pod
        # chose the device itself.
        lives = [row for row in began if row.container in (container, "")]
        if not lives or not all(row.settled_at or not row.used_bytes for row in lives):
            return False
    return any(row.settled_at for row in began)


def _life(row: PodUse) -> tuple[str, str, str]:
    return row.device, row.container, row.started_at
