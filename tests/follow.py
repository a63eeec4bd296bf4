"""Watches one kind of object directly in the API server, and continues after each outage."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import urllib3

from tests.controlplane import ADMIN_TOKEN, ControlPlane
from tests.waiting import PATIENCE_S

Object = dict[str, Any]
#: Listeners are called with "LISTED" and all objects, or with ADDED, MODIFIED or DELETED and one
#: object.
Listen = Callable[[str, Sequence[Object]], None]
_RETRY_S = 0.2
_decode = msgspec.json.Decoder().decode


class Follower:
    """Calls all listeners on the follower's thread, in the order of the server's events.

    ``objects`` returns the objects after the last event that all listeners have processed.
    """

    def __init__(self, plane: ControlPlane, path: str, *listeners: Listen) -> None:
        self._url = f"{plane.url}{path}"
        self._listeners = listeners
        self._stopping = threading.Event()
        self._http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False)
        self._thread = threading.Thread(target=self._run, name=f"follow {path}", daemon=True)
        self.synced = threading.Event()
        #: An exception that a listener raised. It is a bug in the tests.
        self.failure: Exception | None = None
        self._objects: dict[str, Object] = {}
        self._watching: urllib3.BaseHTTPResponse | None = None

    def objects(self) -> list[Object]:
        return list(self._objects.values())

    def start(self) -> None:
        self._thread.start()
        self.synced.wait(PATIENCE_S)

    def stop(self) -> None:
        self._stopping.set()
        if self._watching is not None:
            with contextlib.suppress(OSError, ValueError):  # The watch has just ended.
                self._watching.shutdown()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        version = ""
        while not self._stopping.is_set():
            try:
                if not version:
                    body = _decode(self._get("").data)
                    self._call("LISTED", body["items"] or [])
                    version = body["metadata"]["resourceVersion"]
                    self.synced.set()
                for event in self._events(version):
                    if event["type"] == "ERROR":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._call(event["type"], [event["object"]])
            except (urllib3.exceptions.HTTPError, OSError, ValueError):
                self._stopping.wait(_RETRY_S)
            except Exception as err:  # noqa: BLE001 - the storm's thread raises it
                self.failure = err
                return

    def _events(self, version: str) -> Iterator[Object]:
        """Yield events until the server sends nothing for 5 s. Then the caller starts a new watch,
        which is cheap.
        """
        answer, rest = self._get(f"?watch=1&resourceVersion={version}"), b""
        self._watching = answer
        try:
            if answer.status == 410:
                yield {"type": "ERROR"}
            # After a shutdown, ``read1`` returns raw TLS records.
            while (chunk := answer.read1()) and not self._stopping.is_set():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from map(_decode, lines)
        except urllib3.exceptions.ReadTimeoutError:
            return
        finally:
            answer.close()

    def _get(self, query: str) -> urllib3.BaseHTTPResponse:
        answer = self._http.request(
            "GET",
            self._url + query,
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
            preload_content=not query,
            timeout=urllib3.Timeout(3.0, read=5.0),
        )
        if answer.status not in (200, 410):
            answer.drain_conn()
            raise OSError(f"status {answer.status}")
        return answer

    def _call(self, what: str, objects: Sequence[Object]) -> None:
        for listen in self._listeners:
            listen(what, objects)
        by_uid = {each["metadata"]["uid"]: each for each in objects}
        if what == "LISTED":
            self._objects = by_uid
        elif what == "DELETED":
            self._objects.pop(next(iter(by_uid)), None)
        else:
            self._objects |= by_uid
