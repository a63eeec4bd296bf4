"""Measures SM activity: the share of SM cycles with a warp assigned. The best source is used:

    dcgm           dcgm-exporter's SM_ACTIVE; needs its profiling counters (agent.probes.dcgm)
    gpm            NVML's own counters, Hopper and newer, per GPU instance too
    nvml-process   SM time summed over processes, at most 1; not on MIG

Device utilisation is not SM activity. It is the share of time in which any kernel ran, so one small
kernel on one SM makes it 100 %. It is reported as a separate figure.

GPM compares two samples. The driver allocates them, the meter keeps them from one cycle to the
next, and frees them when the device or instance disappears. So the first cycle has no figure.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent.probes.nvml import Gate
from agent.probes.nvml_errors import DeviceFault, DeviceLost, NvmlError, StaleHandle
from agent.probes.readings import ActivityReading, Degraded
from contract.gpunode import SM_SOURCES

#: NVML: two GPM samples should be at least 100 ms apart.
GPM_APART_S = 0.1
_SM_UTIL, _SM_OCCUPANCY = 2, 3
_METRICS_VERSION = 1
#: Period covered by the first query for process samples.
_FIRST_WINDOW_US = 1_000_000
#: Counters may add up to slightly more than 1; a higher value is invalid.
_MOST_RATIO = 1.01


def ratio(value: float) -> float | None:
    """Return ``value`` as a ratio 0..1; None if it is invalid."""
    return min(value, 1.0) if math.isfinite(value) and 0 <= value <= _MOST_RATIO else None


def best(readings: Iterable[ActivityReading]) -> list[ActivityReading]:
    """Return one reading for each device, with each figure from the best source that has it."""
    found: dict[str, ActivityReading] = {}
    for reading in sorted(readings, key=lambda r: _rank(r.source)):
        known = found.setdefault(reading.uuid, replace(reading, source=""))
        found[reading.uuid] = ActivityReading(
            source=known.source or ("" if reading.sm_ratio is None else reading.source),
            uuid=reading.uuid,
            sm_ratio=_first(known.sm_ratio, reading.sm_ratio),
            occupancy_ratio=_first(known.occupancy_ratio, reading.occupancy_ratio),
            utilization_ratio=_first(known.utilization_ratio, reading.utilization_ratio),
            sm_by_pid=known.sm_by_pid or reading.sm_by_pid,
        )
    return list(found.values())


def _rank(source: str) -> int:
    return SM_SOURCES.index(source) if source in SM_SOURCES else len(SM_SOURCES)


def _first(known: float | None, other: float | None) -> float | None:
    return other if known is None else known


@dataclass(slots=True)
class _Pair:
    older: Any
    newer: Any
    taken_s: float
    #: Result of the last two samples that were at least ``GPM_APART_S`` apart.
    sm_ratio: float | None = None
    occupancy_ratio: float | None = None


class Meter:
    """Measures one physical GPU and its instances. Not thread-safe."""

    def __init__(
        self,
        gate: Gate,
        monotonic: Callable[[], float] = time.monotonic,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._gate = gate
        self._monotonic = monotonic
        self._wall_us = wall_us
        #: (UUID of the GPU, GPU instance) -> its GPM samples; None if it has no GPM.
        self._pairs: dict[tuple[str, int | None], _Pair | None] = {}
        #: UUID -> time of its newest process sample by the driver's clock.
        self._seen_us: dict[str, int] = {}

    def measure(
        self, handle: Any, uuid: str, instances: Mapping[int, Collection[str]] | None = None
    ) -> list[ActivityReading | Degraded]:
        """Measure the GPU, or each of its ``instances`` (number -> UUIDs of their MIG devices).

        A counter that cannot be read yields a ``Degraded``; the device's other figures are not
        affected. Raises ``DeviceLost`` and ``DriverGone``.
        """
        found: list[ActivityReading | Degraded] = []
        for read in (self._gpm, self._processes, self._utilization):
            try:
                found += read(handle, uuid, instances)
            except DeviceLost:
                raise
            except (DeviceFault, StaleHandle) as err:
                found.append(Degraded(_NAMES[read.__name__], f"{uuid}: {err}"))
        return found

    def keep(self, uuids: Collection[str]) -> None:
        """Free the samples of all GPUs except these."""
        for key in [key for key in self._pairs if key[0] not in uuids]:
            self._free(key)
        for uuid in [uuid for uuid in self._seen_us if uuid not in uuids]:
            del self._seen_us[uuid]

    def _gpm(
        self, handle: Any, uuid: str, instances: Mapping[int, Collection[str]] | None
    ) -> list[ActivityReading | Degraded]:
        wanted = {(uuid, instance) for instance in (instances or (None,))}
        for key in [key for key in self._pairs if key[0] == uuid and key not in wanted]:
            self._free(key)
        if instances is None:
            pair = self._pair((uuid, None), handle)
            return [] if pair is None else [_read(pair, uuid)]
        pairs = {instance: self._pair((uuid, instance), handle) for instance in instances}
        return [
            _read(pair, device)
            for instance, pair in pairs.items()
            if pair is not None
            for device in instances[instance]
        ]

    def _pair(self, key: tuple[str, int | None], handle: Any) -> _Pair | None:
        """Take a sample and return the pair of samples of ``key``; None if it has no GPM."""
        if key not in self._pairs:
            support = self._gate.ask("nvmlGpmQueryDeviceSupport", handle)
            pair = None
            if support is not None and support.isSupportedDevice:
                older = self._gate.ask("nvmlGpmSampleAlloc")
                newer = self._gate.ask("nvmlGpmSampleAlloc")
                pair = None if older is None or newer is None else _Pair(older, newer, -math.inf)
            self._pairs[key] = pair
        pair = self._pairs[key]
        if pair is None or self._monotonic() - pair.taken_s < GPM_APART_S:
            return pair
        first = pair.taken_s == -math.inf
        try:
            if not self._sample(key, handle, pair.older):  # overwrites the older sample
                self._free(key)
                self._pairs[key] = None  # the device has GPM, but not this instance
                return None
        except NvmlError:
            self._free(key)  # the failed call may have left anything in the sample: start again
            raise
        pair.older, pair.newer = pair.newer, pair.older
        pair.taken_s = self._monotonic()
        if not first:
            pair.sm_ratio, pair.occupancy_ratio = self._compare(pair)
        return pair

    def _sample(self, key: tuple[str, int | None], handle: Any, sample: Any) -> bool:
        _, instance = key
        if instance is None:
            return self._gate.ask("nvmlGpmSampleGet", handle, sample) is not None
        return self._gate.ask("nvmlGpmMigSampleGet", handle, instance, sample) is not None

    def _compare(self, pair: _Pair) -> tuple[float | None, float | None]:
        asked = self._gate.struct("c_nvmlGpmMetricsGet_t")
        asked.version, asked.numMetrics = _METRICS_VERSION, 2
        asked.sample1, asked.sample2 = pair.older, pair.newer
        asked.metrics[0].metricId, asked.metrics[1].metricId = _SM_UTIL, _SM_OCCUPANCY
        if self._gate.ask("nvmlGpmMetricsGet", asked) is None:
            return None, None
        sm, occupancy = (
            # NVML reports percent.
            ratio(metric.value / 100) if metric.nvmlReturn == 0 else None
            for metric in asked.metrics[:2]
        )
        return sm, occupancy

    def _free(self, key: tuple[str, int | None]) -> None:
        pair = self._pairs.pop(key)
        for sample in () if pair is None else (pair.older, pair.newer):
            try:
                self._gate.ask("nvmlGpmSampleFree", sample)
            except NvmlError:
                return  # the driver is gone, and the sample's memory with it

    def _processes(
        self, handle: Any, uuid: str, instances: Mapping[int, Collection[str]] | None
    ) -> list[ActivityReading | Degraded]:
        if instances is not None:
            return []  # NVML does not measure processes of MIG devices
        now_us = self._wall_us()
        since_us = self._seen_us.get(uuid, now_us)
        if since_us >= now_us:  # the first query, or the wall clock was set back
            since_us = now_us - _FIRST_WINDOW_US
        samples = self._gate.process_samples(handle, since_us)
        if samples is None:
            return []
        newest: dict[int, tuple[int, float]] = {}
        for pid, at_us, percent in samples:
            share = ratio(percent / 100)
            if share is not None:
                newest[pid] = max(newest.get(pid, (0, 0.0)), (at_us, share))
        self._seen_us[uuid] = max([since_us, *(at_us for at_us, _ in newest.values())])
        by_pid = {pid: share for pid, (_, share) in newest.items()}
        total = min(1.0, sum(by_pid.values()))
        return [ActivityReading("nvml-process", uuid, sm_ratio=total, sm_by_pid=by_pid)]

    def _utilization(
        self, handle: Any, uuid: str, instances: Mapping[int, Collection[str]] | None
    ) -> list[ActivityReading | Degraded]:
        if instances is not None:
            return []  # NVML does not measure the utilisation of MIG devices
        rates = self._gate.ask("nvmlDeviceGetUtilizationRates", handle)
        if rates is None:
            return []
        return [ActivityReading("nvml", uuid, utilization_ratio=ratio(rates.gpu / 100))]


_NAMES = {"_gpm": "gpm", "_processes": "nvml-process", "_utilization": "nvml"}


def _read(pair: _Pair, uuid: str) -> ActivityReading:
    return ActivityReading(
        "gpm", uuid, sm_ratio=pair.sm_ratio, occupancy_ratio=pair.occupancy_ratio
    )
