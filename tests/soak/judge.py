"""Compares the memory of processes, as the kernel reports it, with the limits in the manifests.

There are two rules for each process:

* Its peak stays below the memory limit of its container in ``deploy/base``.
* It does not keep growing. All objects of an hour are deleted at its end, so a process must use the
  same memory after every hour. The first half of the day is a warm-up, in which caches and records
  fill. If the growth of the second half continues until the process is upgraded, the memory must
  still be below the limit.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

BASE = Path(__file__).resolve().parents[2] / "deploy/base"
MIB = 1 << 20
#: Maximum age of a process in days. Kubernetes releases three minor versions per year, and nodes
#: are upgraded for each.
LIFE_DAYS = 120
_UNITS = {"Mi": MIB, "Gi": 1 << 30}


@dataclass(slots=True)
class Memory:
    """Memory of one process in bytes. ``rests`` has one value for each hour."""

    rests: list[int] = field(default_factory=list)
    peak: int = 0

    def sample(self, pid: int) -> None:
        self.rests.append(_status_bytes(pid, "VmRSS"))
        self.peak = _status_bytes(pid, "VmHWM")

    def grown_per_day(self) -> int:
        """Return the growth per day in bytes, which is twice the growth in the second half of the
        day.

        The growth is the difference between the medians of the half's first and last third. Medians
        ignore memory that the allocator keeps only after single hours.
        """
        later = self.rests[len(self.rests) // 2 :]
        third = len(later) // 3
        between = len(later) - third  # the number of hours between the middles of the two thirds
        grown = statistics.median(later[-third:]) - statistics.median(later[:third])
        return round(grown * len(self.rests) / between)


def limits() -> dict[str, int]:
    """Return the memory limit in bytes of each container in ``deploy/base``."""
    found = {}
    for path in BASE.glob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            template = ((manifest or {}).get("spec") or {}).get("template") or {}
            for each in template.get("spec", {}).get("containers", ()):
                if amount := each["resources"].get("limits", {}).get("memory"):
                    found[each["name"]] = int(amount[:-2]) * _UNITS[amount[-2:]]
    return found


def findings(measured: Mapping[str, Memory], allowed: Mapping[str, int]) -> list[str]:
    """Return the violated rules. ``allowed`` has the memory limit of each process's container."""
    found = []
    for name, memory in measured.items():
        limit = allowed[name]
        if memory.peak >= limit:
            found.append(f"{name}: {memory.peak >> 20} MiB, the limit is {limit >> 20} MiB")
        elif (later := memory.peak + LIFE_DAYS * memory.grown_per_day()) >= limit:
            found.append(
                f"{name}: grows by {memory.grown_per_day() / MIB:.1f} MiB a day, so it has"
                f" {later >> 20} MiB after {LIFE_DAYS} days; the limit is {limit >> 20} MiB"
            )
    return found


def table(measured: Mapping[str, Memory], allowed: Mapping[str, int]) -> Sequence[str]:
    lines = ["process             after warm-up     end    peak   limit   growth a day"]
    for name, memory in measured.items():
        half = memory.rests[len(memory.rests) // 2]
        mib = [each / MIB for each in (half, memory.rests[-1], memory.peak, allowed[name])]
        figures = f"{mib[0]:13.1f} {mib[1]:7.1f} {mib[2]:7.1f} {mib[3]:7.0f}"
        lines.append(f"{name:<20}{figures} {memory.grown_per_day() / MIB:8.1f} MiB")
    return lines


def _status_bytes(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"process {pid} has no {key}: it has ended")
