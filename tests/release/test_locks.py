"""Checks that each program runs with only the packages in its lock file. The test environment
contains more packages.
"""

import json
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

from tests.controlplane import ROOT
from tests.release.conftest import locked

#: A program that imports modules while the packages in its first argument cannot be imported.
IMPORT = """
import importlib, json, sys
class Missing:
    names = set(json.loads(sys.argv[1]))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    ("lock", "modules"),
    [
        ("demo", ["headroom.commands", "headroom.serve.embedded", "benchmarks.demo.__main__"]),
        ("agent", ["agent.__main__", "agent.gate_client", "headroom.__main__"]),
        ("client", ["headroom.plugin", "headroom.__main__"]),
        (
            "extender",
            ["extender.process", "headroom.console.process", "headroom.webhook.process"],
        ),
        ("extender", ["headroom.recorder.process", "headroom.dra_taints.process"]),
    ],
)
def test_a_program_starts_with_only_the_packages_of_its_lock(lock: str, modules: list[str]) -> None:
    has = {name.lower().replace("_", "-") for name in locked(lock)}
    missing = [
        name
        for name, packages in packages_distributions().items()
        if not any(each.lower().replace("_", "-") in has for each in packages)
        and name not in ("agent", "extender", "headroom")
    ]
    assert "pytest" in missing
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, json.dumps(missing), *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
