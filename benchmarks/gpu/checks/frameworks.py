"""Checks that a framework started by its sample stays within the memory that its pod requested.

The script of the sample runs as in a container, with the variables of an 8 GiB request and a
program that allocates until an allocation fails. Then it multiplies and convolves, because
libraries that are loaded only at that time take memory beside the framework's allocator."""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.children import ROOT, ChildFailed
from benchmarks.gpu.lines import Line, NotPossible, gib, judged, mib
from benchmarks.gpu.machine import Machine, last_line

_SAMPLES = ROOT / "deploy/samples/frameworks"
#: Sample -> the module that must be installed.
FRAMEWORKS = {"pytorch": "torch", "jax": "jax"}
_REQUEST_BYTES = 8 << 30
_RUN_S = 120.0


def within_share(machine: Machine) -> Line:
    machine.alone()
    present = [name for name, module in FRAMEWORKS.items() if importlib.util.find_spec(module)]
    if not present:
        raise NotPossible("neither PyTorch nor JAX is installed for this Python")
    figures = {name: _filled(machine, name) for name in present}
    machine.fixtures.keep("frameworks.json", figures)
    summary = f"request {gib(_REQUEST_BYTES)}: " + "; ".join(
        f"{name} {found['version']} allocates {mib(found['allocated'])}, then uses at most"
        f" {mib(found['listed'])}, {mib(found['listed'] - found['allocated'])} of it outside its"
        " allocator"
        for name, found in figures.items()
    )
    return judged("frameworks", summary, judge_frameworks(figures), figures)


def judge_frameworks(figures: dict[str, dict[str, Any]]) -> list[str]:
    differences = []
    for name, found in figures.items():
        excess_bytes = found["listed"] - _REQUEST_BYTES
        if excess_bytes > 0:
            differences.append(f"{name} uses {mib(excess_bytes)} more than its request")
        if found["allocated"] < _REQUEST_BYTES // 2:
            differences.append(f"{name} can allocate only {mib(found['allocated'])}")
    return differences


def _filled(machine: Machine, name: str) -> dict[str, Any]:
    total_bytes = int(machine.gpu["total"])
    with tempfile.TemporaryDirectory(prefix="headroom-gpu-") as folder:
        program = Path(__file__).with_name("fill_frameworks.py").read_text()
        Path(folder, "train.py").write_text(program)
        done = machine.children.run(
            ["sh", "-ec", f'cd "$1"\n{_script(name)}', "sh", folder],
            _RUN_S,
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{machine.path}",
            CUDA_VISIBLE_DEVICES=machine.uuid,
            FRAMEWORK=FRAMEWORKS[name],
            HEADROOM_VRAM_BYTES=str(_REQUEST_BYTES),
            HEADROOM_VRAM_FRACTION=f"{_REQUEST_BYTES * 10_000 // total_bytes / 10_000:.4f}",
        )
    if done.status:
        raise ChildFailed(f"{name}: exit status {done.status}: {last_line(done.err)}")
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


def _script(name: str) -> str:
    try:
        import yaml
    except ImportError as err:
        raise NotPossible("PyYAML, which reads the samples, is not installed") from err
    pod = yaml.safe_load((_SAMPLES / f"{name}.yaml").read_text())
    return str(pod["spec"]["containers"][0]["args"][0])
