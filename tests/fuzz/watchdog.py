"""Feeds hostile inputs to a target, one after another, and checks their effects.

A target accepts or rejects an input. The input must not cause an undeclared exception, use more CPU
time or memory than its size justifies, leak memory, or change the response to another input. The
target, the seed and the number of an input reproduce it.
"""

import abc
import gc
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from structlog.processors import format_exc_info
from structlog.testing import capture_logs

from tests.fuzz.hostile import attack

#: Maximum CPU seconds for one input. The largest inputs have a few MiB.
CPU_S = 4.0
#: Maximum size of an input, which is the largest body that a port accepts. Repeated mutations
#: rarely produce a larger input.
MOST_BYTES = 16 << 20
#: Memory that one input may need: ``PEAK_BYTES`` plus ``PEAK_TIMES`` its size.
PEAK_BYTES, PEAK_TIMES = 48 << 20, 60
#: Memory that all inputs together may leave in use, because of caches and heap fragmentation.
KEPT_BYTES = 64 << 20
#: Maximum number of reported failures at one place in the code.
_REPORTED = 3
#: Number of inputs between two calls of ``Target.check``.
_CHECKED_EVERY = 100


class Harm(Exception):
    """An input had a forbidden effect."""


class Hang(BaseException):
    """A call took too much CPU time. It is not an Exception, so that no handler of the product
    catches it.
    """


class Target(abc.ABC):
    name: str
    #: Valid inputs, which are JSON trees or bytes.
    seeds: Sequence[Any]

    def make(self, random: Random) -> bytes:
        """Return one hostile input."""
        return attack(self.seeds, random)

    @abc.abstractmethod
    def take(self, data: bytes) -> bool:
        """Process the input. Return whether it was accepted. Raise an exception for any other
        effect.
        """

    def check(self) -> None:
        """Raise ``Harm`` if an earlier input has changed unrelated state."""
        return


@dataclass(slots=True)
class Tally:
    inputs: int = 0
    taken: int = 0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    #: The most memory that one input needed. ``kept_bytes`` is the memory that all inputs left in
    #: use.
    peak_bytes: int = 0
    kept_bytes: int = 0
    failures: list[str] = field(default_factory=list)


def attacked(make: Callable[[], Target], numbers: range, seed: int, cpu_s: float = CPU_S) -> Tally:
    """Feed the inputs with these numbers to a new target. Create another target after each failure.

    ``cpu_s`` is the maximum CPU time of each input in seconds.
    """
    tally, places, resident = Tally(), Counter[object](), 0
    with capture_logs([format_exc_info]) as logs:
        target = make()
        for number in numbers:
            if tally.inputs == 200:  # The caches are warm by now.
                resident = _resident()
            data = target.make(Random(f"{target.name} {seed} {number}"))[:MOST_BYTES]
            tally.inputs += 1
            logs.clear()
            try:
                _feed(target, data, tally, cpu_s)
                if log := next((log for log in logs if "exception" in log), None):
                    raise Harm(f"only logged: {log['event']}\n{log['exception'][-1500:]}")
                if tally.inputs % _CHECKED_EVERY == 0:
                    target.check()
            except (Exception, Hang) as err:  # noqa: BLE001 - any exception is a failure
                place = type(err), *traceback.extract_tb(err.__traceback__)[-1][:2]
                places[place] += 1
                if places[place] <= _REPORTED:
                    what = f"{type(err).__name__}: {str(err)[:2000]}"
                    where = "".join(traceback.format_tb(err.__traceback__)[-5:])
                    again = f"{target.name} --seed {seed} --only {number}"
                    tally.failures.append(f"{again}: {what}\n{where}")
                target = make()
        tally.kept_bytes = max(0, _resident() - resident) if resident else 0
    if tally.kept_bytes > KEPT_BYTES:
        kept = f"{tally.kept_bytes >> 20} MiB stay of {tally.inputs} inputs"
        tally.failures.append(f"{target.name} --seed {seed}: Harm: {kept}")
    return tally


def _feed(target: Target, data: bytes, tally: Tally, cpu_s: float) -> None:
    """Feed one input. Raise an exception if it has a forbidden effect."""
    Path("/proc/self/clear_refs").write_text("5")  # Reset the previous peak.
    peak, began_s = _memory("VmHWM"), time.process_time()
    signal.signal(signal.SIGPROF, _hang)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        tally.taken += target.take(data)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        took_s, rise = time.process_time() - began_s, _memory("VmHWM") - peak
        tally.cpu_s += took_s
        tally.slowest_s = max(tally.slowest_s, took_s)
        tally.peak_bytes = max(tally.peak_bytes, rise)
    if rise > PEAK_BYTES + PEAK_TIMES * len(data):
        raise Harm(f"{rise >> 20} MiB for {len(data)} bytes")
    if took_s > cpu_s:  # The product has caught the first exception.
        raise Hang(f"{took_s:.1f} s of CPU time for {len(data)} bytes")


def _hang(*_: object) -> None:
    raise Hang("more CPU time than its limit")


def _memory(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) << 10


def _resident() -> int:
    gc.collect()
    return _memory("VmRSS")
