"""Reads the memory of the host, if a GPU has no memory of its own."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from agent.probes.readings import (
    DeviceReading,
    HostMemoryReading,
    PoolReading,
    Reading,
    SourceReading,
)
from agent.probes.unified_memory import is_unified

SOURCE = "host-memory"
_LINE = re.compile(r"(MemTotal|MemAvailable): +([0-9]{1,15}) kB")
_MOST_BYTES = 1 << 16


class HostMemoryProbe:
    """Reads the host's memory, which containers can read too.

    ``pool_bytes`` is the size of the pool on nodes without the annotation. If it is 0, the size is
    computed. If it is None, no size is set.
    """

    def __init__(self, pool_bytes: int | None, meminfo: Path = Path("/proc/meminfo")) -> None:
        self._path = meminfo
        self._pool_bytes = pool_bytes

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Return the host's memory and the state of the source. The result is empty if no GPU uses
        the host's memory."""
        if not any(isinstance(r, DeviceReading) and is_unified(r) for r in readings):
            return []
        try:
            with self._path.open("rb") as file:
                text = file.read(_MOST_BYTES).decode("ascii", "replace")
            kib = {name: int(count) for name, count in _LINE.findall(text)}
            total_bytes, available_bytes = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
        except (OSError, KeyError) as err:
            why = f"{self._path} cannot be read: {type(err).__name__}"
            return [SourceReading(SOURCE, "degraded", why)]
        annotated = [r for r in readings if isinstance(r, PoolReading)]
        pool_bytes, error = self._pool_bytes, ""
        if annotated:
            pool_bytes, error = annotated[-1].pool_bytes, annotated[-1].error
        host = HostMemoryReading(SOURCE, total_bytes, available_bytes, pool_bytes, error)
        return [host, SourceReading(SOURCE)]
