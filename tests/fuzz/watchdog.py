"""Feeds hostile inputs to a target, one after the other, and judges their effects.

An input is accepted or rejected. It must not cause an undeclared exception, use more CPU time or
memory than its size justifies, leave memory behind, or change the answer to another input. Target,
seed and number make an input again.
"""

import gc
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import structlog

#: CPU seconds for one input; the largest have a few MiB.
CPU_S = 4.0
#: Memory that one input may need, in addition to a multiple of its size.
PEAK_BYTES, PEAK_TIMES = 48 << 20, 60
#: Memory that all inputs together may leave: caches that fill, fragments of the heap.
KEPT_BYTES = 64 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Failures of one kind that are reported.
_REPORTED = 3


class Harm(Exception):
    """An input changed something that no input may change."""


class Hang(BaseException):
    """Not an Exception, so that no handler of the product catches it."""


class Target(Protocol):
    name: str

    def make(self, random: Random) -> bytes:
        """Return one input."""
        ...

    def take(self, data: bytes) -> bool:
        """Return whether the input was accepted; raises what must not happen."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    target: str
    seed: int
    number: int
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.target} --seed {self.seed} --only {self.number}: {self.what}\n{self.where}"


@dataclass(slots=True)
class Tally:
    target: str
    inputs: int = 0
    taken: int = 0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    #: The most memory that one input needed.
    peak_bytes: int = 0
    kept_bytes: int = 0
    failures: list[Failure] = field(default_factory=list)


def attacked(make: Callable[[], Target], numbers: range, seed: int) -> Tally:
    """Feed a new target the inputs of these numbers."""
    kinds: Counter[str] = Counter()
    complaints: list[str] = []
    with _listening(complaints.append):
        target = make()
        tally = Tally(target.name)
        resident = 0
        for number in numbers:
            if tally.inputs == 200:  # caches are warm
                resident = _resident()
            data = target.make(Random(f"{target.name} {seed} {number}"))
            tally.inputs += 1
            what, where = _fed(target, data, tally, complaints)
            kind = f"{what.split(':')[0]} {where.strip().splitlines()[-2:-1]}"
            kinds[kind] += bool(what)
            if what and kinds[kind] <= _REPORTED:
                tally.failures.append(Failure(target.name, seed, number, what, where))
        tally.kept_bytes = max(0, _resident() - resident) if resident else 0
        if tally.kept_bytes > KEPT_BYTES:
            what = f"Memory: {tally.kept_bytes >> 20} MiB stay of {tally.inputs} inputs"
            tally.failures.append(Failure(target.name, seed, numbers[-1], what))
    return tally


def _fed(target: Target, data: bytes, tally: Tally, complaints: list[str]) -> tuple[str, str]:
    """Return what is wrong with the effects of one input, and where; empty if nothing is."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the previous peak
    peak, began_s = _peak(), time.process_time()
    what = where = ""
    try:
        with _limited(CPU_S):
            tally.taken += target.take(data)
    except (Exception, Hang) as err:  # noqa: BLE001 - any exception is a failure
        what = f"{type(err).__name__}: {str(err)[:500]}"
        where = "".join(traceback.format_exception(err)[-6:])
    took_s, rise = time.process_time() - began_s, _peak() - peak
    tally.cpu_s += took_s
    tally.slowest_s = max(tally.slowest_s, took_s)
    tally.peak_bytes = max(tally.peak_bytes, rise)
    if what:
        pass
    elif complaints:
        what, where = f"Complaint: {complaints[0]}", complaints[0]
    elif rise > PEAK_BYTES + PEAK_TIMES * len(data):
        what = f"Memory: {rise >> 20} MiB for {len(data)} bytes"
    elif took_s > CPU_S:  # a call into C that no signal interrupts
        what = f"Hang: {took_s:.1f} s of CPU time for {len(data)} bytes"
    complaints.clear()
    return what, where


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


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


@contextmanager
def _listening(complain: Callable[[str], None]) -> Iterator[None]:
    """Drop all logs; pass on those of a caught exception that no code expected."""

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
