"""Watches the node's device choice, which the extender copies to ``spec.deviceChoice`` of the
GPUNode.

A watch of this one object reports a change at once and costs nothing while nothing changes.
"""

import random
import threading
from collections.abc import Callable

import msgspec
import structlog

from agent.api_server import ApiServer, NotReached, watch_lines
from contract.gpunode import GROUP, PLURAL, VERSION
from contract.kube import KubeStruct

_log = structlog.get_logger()

#: Seconds after which the API server ends a watch.
_WATCH_S = 300
#: Seconds without a line after which a watch counts as broken. Bookmarks come once a minute.
_QUIET_S = 150.0
#: Seconds between two watches; doubled after each failure.
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class _Spec(KubeStruct, frozen=True):
    device_choice: str = ""


class _Object(KubeStruct, frozen=True):
    kind: str = ""
    spec: _Spec = _Spec()


class _Change(msgspec.Struct, frozen=True):
    type: str
    object: _Object


_decoder = msgspec.json.Decoder(_Change)


class ChoiceWatch:
    """Watches in its own thread, from which it calls ``changed`` after each change."""

    def __init__(self, server: ApiServer, node: str, changed: Callable[[], object]) -> None:
        self._server = server
        self._path = (
            f"/apis/{GROUP}/{VERSION}/{PLURAL}?watch=true&fieldSelector=metadata.name%3D{node}"
            # With resourceVersion=0 the watch begins with the current object.
            f"&resourceVersion=0&allowWatchBookmarks=true&timeoutSeconds={_WATCH_S}"
        )
        self._changed = changed
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="choice", daemon=True)
        #: ``spec.deviceChoice``, "" if it is not set; None until it is known.
        self.device_choice: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end after the next line of the watch; do not wait for it."""
        self._end.set()

    def _run(self) -> None:
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
                    _log.warning("device_choice_not_watched", reason=trouble)
            except Exception:  # noqa: BLE001 - a thread that ended would never see a change again
                _log.exception("device_choice_not_watched")
            self._end.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take(self, line: bytes) -> None:
        if not line:
            return
        try:
            change = _decoder.decode(line)
        except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
            raise NotReached(f"a line of the watch cannot be read: {err}") from err
        if change.type == "ERROR":
            raise NotReached("the API server ended the watch with an error")
        # A deleted object is ignored: the extender creates it again with the same choice.
        if change.type in ("ADDED", "MODIFIED"):
            choice = change.object.spec.device_choice
            if choice != self.device_choice:
                self.device_choice = choice
                self._changed()
