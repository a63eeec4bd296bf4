"""Reads files of Go modules at the versions that a go.mod pins."""

import functools
import json
import os
import subprocess
from pathlib import Path

from tests.gobin import build


@functools.cache
def folder(pinned_in: Path, module: str) -> Path:
    """Return the folder of ``module`` at the version that ``pinned_in``/go.mod pins. Download it
    only once.
    """
    go_mod = (pinned_in / "go.mod").read_text()
    go = build.find_go(build.default_cache(), build.required_go(go_mod))
    answer = subprocess.run(
        [go, "mod", "download", "-json", module],
        cwd=pinned_in,
        env=os.environ | build.build_environment(go_mod),
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(json.loads(answer.stdout)["Dir"])
