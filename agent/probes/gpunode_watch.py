"""Watches the ``spec`` of the node's GPUNode: the ledger and the device choice."""

import random
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from agent.kube_client import ApiServer, NotReached, watch_lines
from agent.probes.readings import ObstacleReading, Reading
from headroom.contract.annotations import DEVICE_CHOICE, DeviceChoice
from headroom.contract.gpunode import GROUP, PLURAL, VERSION, GPUNodeSpec, Reservation
from headroom.contract.kube import KubeStruct

_log = structlog.get_logger()

#: Seconds after which the API server ends a watch.
_WATCH_S = 300
#: If no line arrives for this number of seconds, the watch counts as broken. Bookmarks arrive once
#: a minute.
_QUIET_S = 150.0
#: Seconds between two watches. The pause doubles after each watch that returned no line.
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
#: The values of ``spec.deviceChoice`` that this agent supports.
_CHOICES = frozenset({"", *(choice.value for choice in DeviceChoice)})


class _Spec(KubeStruct, frozen=True):
    device_choice: str = ""
    reservations: msgspec.Raw = msgspec.Raw(b"{}")


class _GPUNode(KubeStruct, frozen=True):
    kind: str = ""
    spec: _Spec = _Spec()


class _Change(msgspec.Struct, frozen=True):
    type: str
    object: _GPUNode


_decoder = msgspec.json.Decoder(_Change)
_reservations = msgspec.json.Decoder(dict[str, Reservation])


class GPUNodeWatch:
    """Keeps the newest ledger and device choice, which the extender copies from the Node.

    A watch of this single object reports each change immediately, and costs nothing while nothing
    changes. It has its own thread, which calls ``changed`` after each change of the device choice.
    """

    def __init__(self, server: ApiServer, node: str, changed: Callable[[], object]) -> None:
        self._server = server
        self._path = (
            f"/apis/{GROUP}/{VERSION}/{PLURAL}?watch=true&fieldSelector=metadata.name%3D{node}"
            # With resourceVersion=0 the watch begins with the current object.
            f"&resourceVersion=0&allowWatchBookmarks=true&timeoutSeconds={_WATCH_S}"
        )
        self._changed = changed
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpunode", daemon=True)
        #: ``spec.deviceChoice``. Empty if it is not set or this agent does not support it, and None
        #: until the watch has returned it.
        self.device_choice: str | None = None
        #: Why ``spec.deviceChoice`` has no effect. Empty if it has an effect.
        self._obstacle = ""
        #: The reservations. Empty if they are unknown. Other threads read this object, so it is
        #: replaced as a whole and never changed in place.
        self.ledger = GPUNodeSpec()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end after the next line of the watch. The call does not wait for
        the end.
        """
        self._end.set()

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Return a reading if this agent does not support the device choice of the GPUNode."""
        return [ObstacleReading(self._obstacle)] if self._obstacle else []

    def _run(self) -> None:
        """Open the watch repeatedly until ``stop`` is called, and log each new cause of a
        failure."""
        pause_s, trouble = _PAUSE_S, ""
        while not self._end.is_set():
            try:
                for line in watch_lines(self._server, self._path, _QUIET_S):
                    self._take(line)
                    pause_s, trouble = _PAUSE_S, ""
                    if self._end.is_set():
                        return
            except NotReached as err:
                if trouble != str(err):
                    trouble = str(err)
                    _log.warning("gpunode_not_watched", reason=trouble)
            except Exception:  # noqa: BLE001 - a thread that ended would never see a change again
                _log.exception("gpunode_not_watched")
            self._end.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take(self, line: bytes) -> None:
        """Process one line of the watch. Raises ``NotReached`` if the watch is unusable."""
        if not line:
            return
        try:
            change = _decoder.decode(line)
        except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
            raise NotReached(f"a line of the watch cannot be read: {err}") from err
        if change.type == "ERROR":
            raise NotReached("the API server ended the watch with an error")
        # A deletion is ignored, because the extender creates the object again with the same choice.
        if change.type in ("ADDED", "MODIFIED"):
            try:
                found = _reservations.decode(change.object.spec.reservations)
            except (ValueError, RecursionError):
                found = {}  # the device choice is still valid
            self.ledger = GPUNodeSpec(reservations=found)
            self._take_choice(change.object.spec.device_choice)

    def _take_choice(self, choice: str) -> None:
        obstacle = ""
        if choice not in _CHOICES:
            obstacle = (
                f"this agent does not support device choice {choice!r} of its GPUNode, and follows"
                " its own --device-choice instead: update the agent, or correct the Node's"
                f" annotation {DEVICE_CHOICE}"
            )
            choice = ""
        if (choice, obstacle) == (self.device_choice, self._obstacle):
            return
        if obstacle:
            _log.warning("device_choice_unknown", reason=obstacle)
        self.device_choice, self._obstacle = choice, obstacle
        self._changed()
