"""Runs ``headroom serve --embedded`` in a child process that ends with the demo."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.demo.wire import ServerFailed

_START_S = 120
_STOP_S = 5
_POLL_S = 0.01

#: Runs ``python -m headroom``. On Linux, the kernel sends it SIGTERM when its parent ends, even by
#: SIGKILL (PR_SET_PDEATHSIG). If the parent ended before this was set, the parent id is different.
_BOOT = """
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv.pop(1)):
        sys.exit(1)
runpy.run_module("headroom", run_name="__main__", alter_sys=True)
"""


class _Serving(msgspec.Struct, frozen=True):
    verbs: str
    debug: str


class Server:
    """A server for one fleet.

    The constructor does not wait until the server is ready, but the URLs do. As a context manager,
    it stops the server at the end.
    """

    def __init__(self, fleet_yaml: str) -> None:
        # For the fleet file and two logs. It is deleted when the server stops.
        self._directory = tempfile.TemporaryDirectory(prefix="headroom-demo-")
        folder = Path(self._directory.name)
        fleet = folder / "fleet.yaml"
        fleet.write_text(fleet_yaml)
        # Files instead of pipes, because the demo does not read while it is busy, and a pipe would
        # fill up.
        self._out, self._err = folder / "stdout", folder / "stderr"
        parent = [str(os.getpid())] if sys.platform == "linux" else []
        command = [sys.executable, "-c", _BOOT, *parent, "serve", "--embedded", str(fleet)]
        command += ["--verbs-port", "0", "--debug-port", "0", "--host", "127.0.0.1"]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            # Its own session, so that Ctrl-C reaches only the demo, which then stops the server.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self._deadline_s = time.monotonic() + _START_S
        self._serving: _Serving | None = None

    @property
    def verbs_url(self) -> str:
        """Base URL of filter, prioritize and bind. Waits; raises ``ServerFailed``."""
        return self._ready().verbs

    @property
    def debug_url(self) -> str:
        """Base URL of the debug API. Waits; raises ``ServerFailed``."""
        return self._ready().debug

    def _ready(self) -> _Serving:
        """Wait until the server prints its URLs.

        Raises ``ServerFailed`` with the end of its log if it ends or takes over two minutes.
        """
        while self._serving is None:
            for line in self._out.read_bytes().splitlines(keepends=True):
                if b'"serving"' in line and line.endswith(b"\n"):
                    self._serving = msgspec.json.decode(line, type=_Serving)
                    return self._serving
            if self._process.poll() is not None or time.monotonic() > self._deadline_s:
                log_lines = self._err.read_text(errors="replace").splitlines()[-10:]
                raise ServerFailed("\n".join(["the server did not start:", *log_lines]))
            time.sleep(_POLL_S)
        return self._serving

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after 5 s. Then delete the temporary files."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()
