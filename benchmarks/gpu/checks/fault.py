"""Runs a kernel that writes to an illegal address. Checks the XID and the agent's reaction."""

import sys
import time
from datetime import UTC, datetime
from typing import Any

from agent.probes.device_health import HARMLESS
from benchmarks.gpu.children import Child
from benchmarks.gpu.lines import Line, NotPossible, judged
from benchmarks.gpu.machine import Machine, device_of

_SAMPLES_BEFORE, _SAMPLES_AFTER = 2, 3
_SAMPLE_S = 30.0
_XID_WITHIN_S = 10.0


def illegal_address(machine: Machine) -> Line:
    machine.alone()
    python = [sys.executable, "-m"]
    agent = machine.children.start([*python, "agent", "--json", "--interval", "1"])
    listener = machine.children.start([*python, "benchmarks.gpu.measures", "xids", machine.uuid])
    try:
        listens = listener.read(_SAMPLE_S)["listens"]
        before = [agent.read(_SAMPLE_S) for _ in range(_SAMPLES_BEFORE)][-1]
        began_at = _now()
        error = _fault(machine)
        xids = _heard(listener) if listens else []
        after = _samples(agent, began_at, _now())
    finally:
        agent.end(at_once=True)
        listener.end()
    again = machine.worker()
    usable = "error" not in again.ask(_SAMPLE_S, do="allocate", bytes=1 << 20)
    again.end()
    figures = {
        "error": error,
        "listens": listens,
        "xids": xids,
        "was healthy": device_of(before, machine.uuid).get("healthy", True),
        "marked": _marks(after, machine.uuid),
        "usable": usable,
    }
    machine.fixtures.keep("illegal-address.json", figures)
    received = ", ".join(map(str, xids)) or "none"
    marked = "; ".join(figures["marked"]) or "nothing: the device stays healthy"
    summary = (
        f"CUDA answers {error or 'no error'}; XID {received}; the agent marks {marked};"
        f" a new process {'can' if usable else 'cannot'} allocate"
    )
    differences = judge_fault(figures)
    if not differences and not listens:
        raise NotPossible(f"the driver gives no XID events for this device; {summary}")
    return judged("illegal-address", summary, differences, figures)


def judge_fault(figures: dict[str, Any]) -> list[str]:
    """Return the differences. The fault belongs to the process, so the device must stay healthy."""
    differences = []
    if not figures["error"]:
        differences.append("the kernel was not stopped")
    if figures["listens"] and not figures["xids"]:
        differences.append(f"no XID came within {_XID_WITHIN_S:g} s")
    differences += [
        f"XID {xid} makes a device unhealthy" for xid in figures["xids"] if xid not in HARMLESS
    ]
    if figures["was healthy"]:
        differences += [f"the agent marks the device: {why}" for why in figures["marked"]]
    if not figures["usable"]:
        differences.append("no new process can use the device")
    return differences


def _samples(agent: Child, began_at: str, ended_at: str) -> list[dict[str, Any]]:
    """Return every sample taken after ``began_at``, including some after ``ended_at``.

    The pipe also has older samples, which do not show the fault.
    """
    found: list[dict[str, Any]] = []
    late = 0
    while late < _SAMPLES_AFTER:
        status = agent.read(_SAMPLE_S)
        late += status["observedAt"] > ended_at
        if status["observedAt"] > began_at:
            found.append(status)
    return found


def _now() -> str:
    """Return the time in the form of ``observedAt``, so that text sorts like time."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _fault(machine: Machine) -> str:
    worker = machine.worker()
    try:
        return str(worker.ask(_SAMPLE_S, do="fault").get("error", ""))
    finally:
        worker.end()


def _heard(listener: Child) -> list[int]:
    """Return the XIDs that arrive. Stop if no further XID arrives for a second after the first, or
    if none arrives at all."""
    xids: list[int] = []
    until_s = time.monotonic() + _XID_WITHIN_S
    while (wait_s := until_s - time.monotonic()) > 0:
        event = listener.read_or_none(1.0 if xids else wait_s)
        if event is None:
            break
        xids.append(event["xid"])
    return xids


def _marks(statuses: list[dict[str, Any]], uuid: str) -> list[str]:
    devices = [device_of(status, uuid) for status in statuses]
    reasons = [d.get("healthReason", "") for d in devices if not d.get("healthy", True)]
    return [*dict.fromkeys(reasons)]
