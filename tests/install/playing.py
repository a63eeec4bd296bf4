"""Runs a play in a separate process, which has its own namespaces."""

import json
import os
import subprocess
import sys
from typing import Any

import typer

from tests.controlplane import ROOT
from tests.processes import DIE_WITH_PARENT


def result_of(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module and return the JSON in its last line of output. Print the duration of
    each step.
    """
    done = subprocess.run(
        [*DIE_WITH_PARENT, str(os.getpid()), sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-20_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    typer.echo(json.dumps(found, indent=1))
    return found
