"""Feeds hostile inputs to a target, one after the other, and judges what they did.

An input may be accepted or rejected. Harm is anything else: an undeclared exception, more CPU time
than its bytes justify, memory that is not freed, or a changed answer about another object. Each can
be reproduced from target, seed and number.
"""

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import structlog

#: CPU seconds for one input of any size here; the largest are a few MiB.
CPU_S = 4.0
#: Memory that one input may need in addition to a multiple of its own bytes.
PEAK_BYTES, PEAK_TIMES = 48 << 20, 60
#: Memory that may stay after all inputs: caches that fill, fragments of the heap.
KEPT_BYTES = 64 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Maximum number of failures of one kind that are printed.
_TOLD = 3


class Harm(Exception):
    """Something was changed that no input may change."""


class Hang(BaseException):
    """Not an Exception: what catches everything must not swallow it."""


class Target(Protocol):
    name: str

    def make(self, random: Random) -> bytes:
        """One input."""
        ...

    def take(self, data: bytes) -> bool:
        """Feed it; return whether it was accepted. Raise on anything that must not happen."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    target: str
    seed: int
    number: int
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.target} --seed {self.seed} --only {self.number}: {self.what}\n{self.where}"


@dataclass(slots=True)
class Tally:
    target: str
    inputs: int = 0
    taken: int = 0
    bytes: int = 0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    #: By how much the largest input raised the peak.
    peak_bytes: int = 0
    kept_bytes: int = 0
    failures: list[Failure] = field(default_factory=list)


def attacked(make: Callable[[], Target], numbers: range, seed: int) -> Tally:
    """Feed a new target inputs of these numbers."""
    kinds: dict[str, int] = {}
    complaints: list[str] = []
    with _listening(complaints.append):
        target = make()
        tally = Tally(target.name)
        warm = min(len(numbers), 200)
        resident = 0
        for count, number in enumerate(numbers):
            if count == warm:
                resident = _resident()
            data = target.make(Random(f"{target.name} {seed} {number}"))
            tally.inputs += 1
            tally.bytes += len(data)
            failure = _fed(target, data, tally, complaints)
            if failure is not None:
                what, where = failure
                kind = f"{what.split(':')[0]} {where.strip().splitlines()[-2:-1]}"
                kinds[kind] = kinds.get(kind, 0) + 1
                if kinds[kind] <= _TOLD:
                    tally.failures.append(Failure(target.name, seed, number, what, where))
        if resident:
            tally.kept_bytes = max(0, _resident() - resident)
            if tally.kept_bytes > KEPT_BYTES:
                what = f"Memory: {tally.kept_bytes >> 20} MiB stay of {tally.inputs} inputs"
                tally.failures.append(Failure(target.name, seed, numbers[-1], what, ""))
    return tally


def _fed(
    target: Target, data: bytes, tally: Tally, complaints: list[str]
) -> tuple[str, str] | None:
    """The harm of its reaction, and where; None if it is right."""
    _forget_peak()
    peak, began_s = _peak(), time.process_time()
    failure: tuple[str, str] | None = None
    try:
        with _limited(CPU_S):
            tally.taken += target.take(data)
    except (Exception, Hang) as err:  # noqa: BLE001 - whatever it is, it is what is looked for
        failure = (f"{type(err).__name__}: {str(err)[:500]}", _where(err))
    took_s, rise = time.process_time() - began_s, _peak() - peak
    tally.cpu_s += took_s
    tally.slowest_s = max(tally.slowest_s, took_s)
    tally.peak_bytes = max(tally.peak_bytes, rise)
    if complaints:
        failure = failure or (f"Complaint: {complaints[0]}", complaints[0])
        complaints.clear()
    if failure is None and rise > PEAK_BYTES + PEAK_TIMES * len(data):
        return f"Memory: {rise >> 20} MiB for {len(data)} bytes", ""
    if failure is None and took_s > CPU_S:  # a call into C that no signal interrupts
        return f"Hang: {took_s:.1f} s of CPU time for {len(data)} bytes", ""
    return failure


def _where(err: BaseException) -> str:
    return "".join(traceback.format_exception(err)[-6:])


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    def hang(*_: object) -> None:
        raise Hang(f"more than {cpu_s:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _forget_peak() -> None:
    """Earlier allocations of this process hide no peak of an input."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


@contextmanager
def _listening(complain: Callable[[str], None]) -> Iterator[None]:
    """Drop log output, except for caught exceptions that no code expected."""

    def hear(logger: object, method: str, event: MutableMapping[str, Any]) -> Any:
        if method == "exception" or event.get("exc_info"):
            complain(f"{event.get('event')}\n{traceback.format_exc()[-1500:]}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[hear], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
