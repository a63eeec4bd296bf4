"""Reads the resource usage of a process from the kernel."""

import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Vitals:
    at_s: float
    cpu_s: float
    resident_mib: float
    peak_mib: float
    fds: int
    threads: int


def vitals(pid: int) -> Vitals:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()

    def mib(key: str) -> float:
        found = re.search(rf"^{key}:\s+(\d+) kB$", status, re.M)
        return int(found[1]) / 1024 if found else 0.0  # a zombie has no memory

    return Vitals(
        time.monotonic(),
        (int(stat[11]) + int(stat[12])) / TICKS_PER_S,
        mib("VmRSS"),
        mib("VmHWM"),
        len(os.listdir(f"/proc/{pid}/fd")),
        int(stat[17]),
    )


def at_rest(pid: int) -> Vitals:
    """Return the fewest descriptors and threads of several readings, because each sample or scrape
    opens some."""
    moments = []
    for _ in range(20):
        moments.append(vitals(pid))
        time.sleep(0.05)
    fds, threads = min(each.fds for each in moments), min(each.threads for each in moments)
    return replace(moments[-1], fds=fds, threads=threads)
