"""The page of all programs: how many of Headroom's modules each imports, and from which
packages."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from reference.markdown import ROOT, code, head, table

#: Program -> the module that its process imports.
PROGRAMS: Mapping[str, str] = {
    "headroom extender": "extender.process",
    "headroom console": "headroom.console.process",
    "headroom webhook": "headroom.webhook.process",
    "headroom recorder": "headroom.recorder.process",
    "headroom device-taints": "headroom.dra_taints.process",
    "headroom serve": "headroom.serve.extender_and_console",
    "headroom agent": "agent.__main__",
    "headroom gate": "agent.gate_client",
    "headroom certs": "headroom.certs.commands",
    "headroom convert": "headroom.convert.manifests",
    "headroom doctor": "headroom.doctor.node_rules",
    "headroom plan": "headroom.planner.study",
    "kubectl headroom": "headroom.plugin",
}
_INTRO = """\
Each program imports only the shared packages that it needs, and never another program
([architecture](../design/architecture.md#import-rules)). The third column has the number of
lines of these modules.

"""
#: Libraries that the programs import. They are imported once, for all programs.
_LIBRARIES = (
    *("aiohttp", "cryptography.x509", "fastapi", "grpc", "kubernetes.client", "numpy"),
    *("prometheus_client", "pydantic_settings", "rich.console", "typer", "uvicorn"),
)
#: A program that imports each module in its arguments in a process of its own, and prints the
#: number of lines of each module of Headroom that this import loads.
_CLOSURES = """
import contextlib, importlib, json, os, sys
libraries, *modules = sys.argv[1:]
for library in libraries.split():
    with contextlib.suppress(ImportError):
        importlib.import_module(library)
for module in modules:
    if os.fork() == 0:
        importlib.import_module(module)
        ours = {
            name: module.__file__
            for name, module in sys.modules.items()
            if name.partition(".")[0] in ("agent", "extender", "headroom") and module.__file__
        }
        lines = {n: sum(1 for _ in open(f, encoding="utf-8")) for n, f in ours.items()}
        print(json.dumps(lines), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
"""


def closures(modules: Sequence[str]) -> list[dict[str, int]]:
    """Return for each module the modules of Headroom that its import loads, with their lines."""
    command = [sys.executable, "-c", _CLOSURES, " ".join(_LIBRARIES), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def page() -> str:
    """Return docs/reference/programs.md."""
    rows = []
    modules = closures([*PROGRAMS.values()])
    for program, found in zip(PROGRAMS, modules, strict=True):
        rooms = Counter(map(_room, found))
        names = ", ".join(f"{code(room)} {count}" for room, count in sorted(rooms.items()))
        size = str(len(found)), str(round(sum(found.values()) / 1000))
        rows.append((code(program), *size, names))
    text = head("Imports of each program", "the imports of each program") + _INTRO
    return text + table("program | modules | lines (thousands) | modules by package", rows)


def _room(module: str) -> str:
    """Return the package that the table names for a module: ``headroom.core``, or ``extender``."""
    first, *rest = module.split(".")
    return f"headroom.{rest[0]}" if first == "headroom" and len(rest) > 1 else first
