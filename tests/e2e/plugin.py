"""Runs `kubectl headroom`."""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from headroom.kubectl.commands import main


@dataclass(frozen=True, slots=True)
class Shown:
    status: int
    stdout: str
    stderr: str


def headroom(*arguments: str | Path) -> Shown:
    """Run the kubectl plugin in this process, because starting a process takes longer than the
    command.
    """
    stdout, stderr, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, {"HEADROOM_SERVER": "", "HEADROOM_TOKEN": ""}),
        mock.patch.object(sys, "argv", ["kubectl-headroom", *map(str, arguments)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as err:
            status = int(err.code or 0)
    return Shown(status, stdout.getvalue(), stderr.getvalue())
