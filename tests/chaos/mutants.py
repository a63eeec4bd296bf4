"""Copies of the product with one safeguard taken out each, to see the auditor notice."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.controlplane import ROOT

PACKAGES = ("contract", "extender", "agent", "headroom")


@dataclass(frozen=True, slots=True)
class Mutant:
    """In ``module`` the text ``was``, found once, becomes ``becomes``."""

    module: str
    was: str
    becomes: str


MUTANTS = {
    # The write no longer depends on the object that it was computed from.
    "no compare-and-swap": Mutant(
        "extender/ledger/kubernetes.py",
        '"metadata": {"resourceVersion": version, **untracked}, "spec": changes',
        '"metadata": untracked, "spec": changes',
    ),
    # Promises that nobody needs any more stay.
    "no removal": Mutant(
        "extender/ledger/protocol.py",
        "        for _ in range(ATTEMPTS):\n"
        "            try:\n"
        "                gpunode = await self._store.read_gpunode(node)\n"
        "                if gpunode is None or uid not in gpunode.spec.reservations:\n",
        "        for _ in range(0):\n"
        "            try:\n"
        "                gpunode = await self._store.read_gpunode(node)\n"
        "                if gpunode is None or uid not in gpunode.spec.reservations:\n",
    ),
    # Pods are bound, and promised nothing.
    "no promise": Mutant(
        "extender/ledger/protocol.py",
        "        elif placement.charges:\n",
        "        elif False:\n",
    ),
    # Who was bound by somebody else is not written down.
    "no adoption": Mutant(
        "extender/ledger/protocol.py",
        "if (promise := self._adopt(pod, gpunode)) is None:\n                    return True",
        "return True\n                promise = None",
    ),
}


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[Path]:
    """The folder that holds the product's packages, broken in that way; None: as it is."""
    if name is None:
        yield ROOT
        return
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory(prefix="headroom-mutant-") as folder:
        code = Path(folder)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, code / package)
        module = code / mutant.module
        text = module.read_text()
        assert text.count(mutant.was) == 1, f"the mutant {name!r} is out of date"
        module.write_text(text.replace(mutant.was, mutant.becomes))
        yield code
