"""Runs the start scripts in deploy/samples/frameworks with some replaced programs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.controlplane import ROOT

SAMPLES = ROOT / "deploy/samples/frameworks"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.yaml"))

#: Maps each sample to the program that it starts.
STARTS = {
    "jax": "python3",
    "llama-cpp": "llama-server",
    "ollama": "ollama",
    "pytorch": "python3",
    "tensorflow": "python3",
    "triton": "tritonserver",
    "vllm": "vllm",
}

#: A program that records its arguments and environment as JSON.
RECORDER = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
Path("called.json").write_text(json.dumps({{"args": sys.argv[1:], "env": dict(os.environ)}}))
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a script. ``args`` and ``env`` come from ``RECORDER``, and are None if the
    script did not start it.
    """

    code: int
    output: str
    args: list[str] | None
    env: Mapping[str, str]


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((SAMPLES / f"{name}.yaml").read_text())
    return loaded


def nvidia_smi(*gpus: Mapping[str, int]) -> str:
    """Return a program that answers --query-gpu with these values. ``gpus`` maps fields such as
    ``memory.free`` to MiB.
    """
    return f"""#!{sys.executable}
import sys
(query,) = [arg for arg in sys.argv if arg.startswith("--query-gpu=")]
assert sys.argv[-1] == "--format=csv,noheader,nounits", sys.argv
for gpu in {[dict(gpu) for gpu in gpus]!r}:
    print(", ".join(str(gpu[each]) for each in query.partition("=")[2].split(",")))
"""


def run(
    name: str,
    folder: Path,
    variables: Mapping[str, str],
    programs: Mapping[str, str],
    timeout_s: float = 60,
) -> Ran:
    """Run the command of a sample in ``folder``. ``programs`` replace programs of the system.

    The environment contains only PATH, the variables of the sample, and ``variables``.
    """
    (container,) = manifest(name)["spec"]["containers"]
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for program, text in programs.items():
        (binaries / program).write_text(text)
        (binaries / program).chmod(0o755)
    own = {each["name"]: each["value"] for each in container.get("env", ())}
    path = f"{binaries}:{os.defpath.lstrip(':')}:/usr/bin:/bin"
    program, *args = [*container["command"], *container["args"]]
    found = binaries / program
    done = subprocess.run(
        [found if found.exists() else program, *args],
        cwd=folder,
        env={"PATH": path, **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    called = folder / "called.json"
    record = json.loads(called.read_text()) if called.exists() else {"args": None, "env": {}}
    return Ran(done.returncode, done.stdout, record["args"], record["env"])
