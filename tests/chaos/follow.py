"""Follows one kind of object at the API server itself, around every proxy; never gives up.

A listener gets a list (all objects) or one change, in the server's order; several listeners are
called one after the other, on the follower's thread.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import urllib3

from tests.controlplane import ADMIN_TOKEN, ControlPlane

Object = dict[str, Any]
#: "LISTED" and all there are, or ADDED, MODIFIED or DELETED and the one object.
Listen = Callable[[str, Sequence[Object]], None]
_RETRY_S = 0.2
_WATCH_S = 30

_decode = msgspec.json.Decoder().decode


class _Anew(Exception):
    """The held objects may differ from the existing ones."""


class Follower:
    def __init__(self, plane: ControlPlane, path: str, *listeners: Listen) -> None:
        self._plane = plane
        self._path = path
        self._listeners = listeners
        self._stopping = threading.Event()
        self._http = urllib3.PoolManager(
            ca_certs=str(plane.ca_file), retries=False, timeout=urllib3.Timeout(3.0, read=10.0)
        )
        self._thread = threading.Thread(target=self._run, name=f"follow {path}", daemon=True)
        self._synced = threading.Event()
        #: Exception of a listener: a bug of the tests.
        self.failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()
        self._synced.wait(30.0)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(_WATCH_S + 5.0)

    def _run(self) -> None:
        version: str | None = None
        while not self._stopping.is_set():
            try:
                version = self._watch(version or self._list())
            except _Anew:
                version = None
            except (urllib3.exceptions.HTTPError, OSError, ValueError):
                self._stopping.wait(_RETRY_S)
            except Exception as err:  # noqa: BLE001 - raised by the caller of ``failure``
                self.failure = err
                return

    def _tell(self, what: str, objects: Sequence[Object]) -> None:
        for listen in self._listeners:
            listen(what, objects)

    def _list(self) -> str:
        answer = self._get("")
        if answer.status != 200:
            answer.drain_conn()
            raise OSError(f"{answer.status}")
        body = _decode(answer.data)
        self._tell("LISTED", body["items"] or [])
        self._synced.set()
        version: str = body["metadata"]["resourceVersion"]
        return version

    def _watch(self, version: str) -> str:
        """Returns where the next watch goes on."""
        query = (
            f"?watch=1&allowWatchBookmarks=1&timeoutSeconds={_WATCH_S}&resourceVersion={version}"
        )
        answer = self._get(query, read_timeout_s=5.0)
        try:
            if answer.status != 200:
                raise _Anew if answer.status == 410 else OSError(f"{answer.status}")
            rest = b""
            while not self._stopping.is_set():
                try:
                    chunk = answer.read1()
                except urllib3.exceptions.ReadTimeoutError:
                    break  # quiet: a new watch from here costs nothing
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = _decode(line)
                    if event["type"] == "ERROR":
                        raise _Anew
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._tell(event["type"], [event["object"]])
        except (urllib3.exceptions.HTTPError, OSError):
            # Events that were delivered are not repeated.
            self._stopping.wait(_RETRY_S)
        finally:
            answer.close()
        return version

    def _get(self, query: str, read_timeout_s: float = 10.0) -> urllib3.BaseHTTPResponse:
        return self._http.request(
            "GET",
            f"{self._plane.url}{self._path}{query}",
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
            preload_content=not query,
            timeout=urllib3.Timeout(3.0, read=read_timeout_s),
        )
