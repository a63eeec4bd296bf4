"""Copies of the product without one safeguard, to prove that the auditor notices."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.controlplane import ROOT

PACKAGES = ("contract", "extender", "agent", "headroom")


class Mutant(NamedTuple):
    """In ``module`` the text ``was``, which occurs once, is replaced."""

    module: str
    was: str
    becomes: str


def _bind_asks(whom: str) -> Mutant:
    """Wait, before a bind goes on, for an answer from the port in an environment variable."""
    was = "        state.assumed.bind_received(args.pod_uid)\n"
    asks = (
        "        import asyncio, os\n"
        f"        port = os.environ['CHAOS_{whom}']\n"
        "        reader, writer = await asyncio.open_connection('127.0.0.1', port)\n"
        "        writer.write(b'GET /healthz HTTP/1.1\\r\\nHost: console\\r\\n\\r\\n')\n"
        "        await reader.read(1)\n"
        "        writer.close()\n"
    )
    return Mutant("extender/scheduler/bind.py", was, asks + was)


_ATTEMPTS = (
    "            try:\n"
    "                gpunode = await self.store.read_gpunode(node)\n"
    "                if gpunode is None or uid not in gpunode.spec.reservations:\n"
)
MUTANTS = {
    # A write does not depend on the version of the object that it was computed from.
    "no compare-and-swap": Mutant(
        "extender/ledger/kube_store.py",
        '"metadata": {"resourceVersion": version, **untracked}, "spec": changes',
        '"metadata": untracked, "spec": changes',
    ),
    # Orphaned reservations stay.
    "no removal": Mutant(
        "extender/ledger/reservations.py",
        "        for _ in range(ATTEMPTS):\n" + _ATTEMPTS,
        "        for _ in range(0):\n" + _ATTEMPTS,
    ),
    # Pods are bound without a reservation.
    "no reservation": Mutant(
        "extender/ledger/bind.py", "        elif placement.charges:\n", "        elif False:\n"
    ),
    # Unreserved pods get no reservation.
    "no adoption": Mutant(
        "extender/ledger/reservations.py",
        "if (reservation := self.adopt(pod, gpunode)) is None:\n                    return True",
        "return True\n                reservation = None",
    ),
    "bind asks the console": _bind_asks("CONSOLE"),
    "bind asks the webhook": _bind_asks("WEBHOOK"),
}


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[Path]:
    """Yield a folder with the product's packages, changed in that way; None: the repository."""
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
