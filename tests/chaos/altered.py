"""Changes the process of an extender in a storm. Its clock can move, and a mutant lacks one
safeguard.

Mutants prove that the auditor detects a missing safeguard.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import time_machine

from extender.ledger.bind import Binder
from extender.ledger.kube_store import KubernetesStore
from extender.ledger.reservations import Reservations
from extender.scheduler.bind import Bind

_call, _fit, _bind = KubernetesStore._call, Binder._fit, Bind.__call__


async def _call_without_version(
    store: KubernetesStore, what: str, method: str, path: str, body: bytes | None = None, *rest: str
) -> bytes:
    if what.startswith("write spec"):
        changed = json.loads(body or b"")
        del changed["metadata"]["resourceVersion"]
        body = json.dumps(changed).encode()
    return await _call(store, what, method, path, body, *rest)


async def _fit_without_reservation(binder: Binder, pending: Any, *rest: Any, fresh: bool) -> None:
    await _fit(binder, pending, *rest, fresh=fresh)
    pending.reservation = None


def _bind_after_asking(port_name: str) -> Callable[[Bind, bytes], Any]:
    """Make each bind wait for a response from the port that an environment variable names."""

    async def bind(self: Bind, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ[port_name]))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: console\r\n\r\n")
        await reader.read(1)
        writer.close()
        return await _bind(self, body)

    return bind


#: Starting a mutant raises an exception if the product no longer has the method that it replaces.
MUTANTS: dict[str, Any] = {
    # Writes succeed even if the object has changed since it was read.
    "no compare-and-swap": patch.object(KubernetesStore, "_call", _call_without_version),
    # Orphaned reservations are not removed.
    "no removal": patch.object(Reservations, "remove", autospec=True, return_value=False),
    # Pods are bound without a reservation.
    "no reservation": patch.object(Binder, "_fit", _fit_without_reservation),
    # Unreserved pods are not adopted.
    "no adoption": patch.object(Reservations, "charge", autospec=True, return_value=True),
    "bind asks the console": patch.object(Bind, "__call__", _bind_after_asking("CHAOS_CONSOLE")),
    "bind asks the webhook": patch.object(Bind, "__call__", _bind_after_asking("CHAOS_WEBHOOK")),
}


def alter(clock: Path, mutant: str | None) -> None:
    """Change this process before it runs an extender.

    ``clock`` is a file with the seconds to add to the true time. The file may be replaced at any
    time. Monotonic clocks do not change.
    """
    if mutant is not None:
        MUTANTS[mutant].start()
    traveller = time_machine.travel(datetime.now(UTC), tick=True).start()
    threading.Thread(target=_follow, args=(clock, traveller), daemon=True).start()


def _follow(file: Path, clock: time_machine.Traveller) -> None:
    moved_s = 0.0
    while True:
        # The file is empty while it is being written.
        offset_s = float(file.read_text() or moved_s)
        clock.shift(offset_s - moved_s)
        moved_s = offset_s
        time.sleep(0.1)
