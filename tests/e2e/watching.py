"""Measures when API server events arrive, with one clock for all watches."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import urllib3

from tests.controlplane import ADMIN_TOKEN, ControlPlane

Object = dict[str, Any]


class Watch:
    """Records the changes of the objects under a path during the context."""

    def __init__(self, plane: ControlPlane, path: str) -> None:
        version = plane.call("GET", path)["metadata"]["resourceVersion"]
        http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False)
        self._answer = http.request(
            "GET",
            f"{plane.url}{path}?watch=1&resourceVersion={version}",
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
            preload_content=False,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._began_s = time.monotonic()
        self._over = False
        #: The changed objects in order, each with its time on the monotonic clock.
        self.changes: list[tuple[float, Object]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None
    ) -> None:
        self._over = True  # After the shutdown, the reader would see raw TLS records.
        self._answer.shutdown()
        self._thread.join()

    def quiet_s(self) -> float:
        """Return the seconds since the last change, or since the start of the watch if there was no
        change.
        """
        changes = list(self.changes)
        return time.monotonic() - (changes[-1][0] if changes else self._began_s)

    def first(
        self, name: str, true: Callable[[Object], object], after_s: float = 0.0
    ) -> float | None:
        """Return the time when the watch first showed the object in this state, or None."""
        for at_s, changed in list(self.changes):
            if at_s >= after_s and changed["metadata"]["name"] == name and true(changed):
                return at_s
        return None

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            while chunk := self._answer.read1():
                at_s = time.monotonic()
                if self._over:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                self.changes += [(at_s, json.loads(line)["object"]) for line in lines]
        self._answer.close()
