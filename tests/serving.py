"""Runs ``headroom serve --embedded`` in its own process, for tests over HTTP."""

import contextlib
import http.client
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.forks import Forked, pipe
from tests.waiting import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Server:
    verbs: str
    debug: str
    #: Log file with one JSON object per line.
    log: Path

    def post(self, path: str, body: bytes | object, headers: Mapping[str, str] = {}) -> Reply:
        """Send a POST to the port for kube-scheduler. A body that is not bytes is encoded
        as JSON.
        """
        return self._send(self.verbs, "POST", path, body, headers)

    def debug_post(self, path: str, body: object) -> Reply:
        return self._send(self.debug, "POST", path, body, {})

    def get(self, path: str) -> Reply:
        return self._send(self.debug, "GET", path, b"", {})

    def delete(self, path: str) -> Reply:
        return self._send(self.debug, "DELETE", path, b"", {})

    def _send(
        self, base: str, method: str, path: str, body: bytes | object, headers: Mapping[str, str]
    ) -> Reply:
        url = urlsplit(base)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            payload = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **headers}
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return Reply(response.status, response.read())


@contextlib.contextmanager
def serving(
    fleet_yaml: str,
    *options: str,
    program: Sequence[str] = ("headroom",),
    inside: Callable[[], None] | None = None,
) -> Iterator[Server]:
    """Serve the fleet on free loopback ports. The process ends at the end of the context.

    ``program`` is the module that runs the command, followed by its first arguments. The process
    calls ``inside`` before the command. Raise ``TimeoutError`` if the process does not end within
    ``PATIENCE_S`` after SIGTERM.
    """
    with tempfile.TemporaryDirectory() as folder:
        fleet, log = Path(folder, "fleet.yaml"), Path(folder, "log")
        fleet.write_text(fleet_yaml, encoding="utf-8")
        module, *before = program
        arguments = [*before, "serve", "--embedded", str(fleet)]
        arguments += ["--verbs-port", "0", "--debug-port", "0", *options]
        ours, theirs = pipe()
        process = Forked(module, arguments, log, os.environ, theirs, inside=inside)
        theirs.close()
        try:
            with os.fdopen(os.dup(ours.fileno())) as stdout:
                line = stdout.readline()
            assert line, f"the server did not start: {log.read_text()}"
            where = json.loads(line)
            yield Server(where["verbs"], where["debug"], log)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise TimeoutError(f"the server did not end: {log.read_text()}") from None
            finally:
                ours.close()


def pod(
    name: str,
    vram: str | None = None,
    *,
    gpus: int = 1,
    resource: str = "nvidia.com/gpu",
    namespace: str = "default",
    version: str = "1",
) -> dict[str, Any]:
    """Return a pending pod as JSON, as kube-scheduler sends it. Its uid is ``uid-<name>``."""
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "annotations": {} if vram is None else {"headroom.gpu/vram": vram},
        },
        "spec": {"containers": [{"name": "main", "resources": {"limits": {resource: str(gpus)}}}]},
        "status": {"phase": "Pending"},
    }


def offer(pod: dict[str, Any] | None, *names: str) -> dict[str, Any]:
    """Return the body of a filter or prioritize request."""
    return {"Pod": pod, "Nodes": None, "NodeNames": list(names)}


def binding(pod: dict[str, Any], node: str) -> dict[str, str]:
    metadata = pod["metadata"]
    return {
        "PodName": metadata["name"],
        "PodNamespace": metadata["namespace"],
        "PodUID": metadata["uid"],
        "Node": node,
    }
