"""Copies of the product without one safeguard, to prove that the auditor notices."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.controlplane import ROOT
from tests.mutation import PACKAGES

_RECEIVED = "        state.assumed.bind_received(args.pod_uid)\n"
#: Waits, before a bind goes on, for an answer from the port in an environment variable.
_ASK = """        import asyncio, os
        port = os.environ['CHAOS_{}']
        reader, writer = await asyncio.open_connection('127.0.0.1', port)
        writer.write(b'GET /healthz HTTP/1.1\\r\\nHost: console\\r\\n\\r\\n')
        await reader.read(1)
        writer.close()
"""
#: Name -> module, the text in it that is replaced, which occurs once, and the new text.
MUTANTS = {
    # A write does not depend on the version of the object that it was computed from.
    "no compare-and-swap": (
        "extender/ledger/kube_store.py",
        '"metadata": {"resourceVersion": version, **untracked}, "spec": changes',
        '"metadata": untracked, "spec": changes',
    ),
    # Orphaned reservations stay.
    "no removal": (
        "extender/ledger/reservations.py",
        "or uid not in gpunode.spec.reservations:\n                    return True",
        "or True:\n                    return False",
    ),
    # Pods are bound without a reservation.
    "no reservation": ("extender/ledger/bind.py", "elif placement.charges:", "elif False:"),
    # Unreserved pods get no reservation.
    "no adoption": (
        "extender/ledger/reservations.py",
        "if (reservation := self.adopt(pod, gpunode)) is None:",
        "if (reservation := None) is None:",
    ),
    "bind asks the console": (
        "extender/scheduler/bind.py",
        _RECEIVED,
        _ASK.format("CONSOLE") + _RECEIVED,
    ),
    "bind asks the webhook": (
        "extender/scheduler/bind.py",
        _RECEIVED,
        _ASK.format("WEBHOOK") + _RECEIVED,
    ),
}


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[Path]:
    """Yield a folder with the product's packages, changed in that way; None: the repository."""
    if name is None:
        yield ROOT
        return
    module, was, becomes = MUTANTS[name]
    with tempfile.TemporaryDirectory(prefix="headroom-mutant-") as folder:
        code = Path(folder)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, code / package)
        text = (code / module).read_text()
        assert text.count(was) == 1, f"the mutant {name!r} is out of date"
        (code / module).write_text(text.replace(was, becomes))
        yield code
