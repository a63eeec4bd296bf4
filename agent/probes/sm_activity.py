"""Measures SM activity, the share of SM cycles with a warp assigned, with the best available
source:

    dcgm           dcgm-exporter's SM_ACTIVE; needs its profiling counters (agent.probes.dcgm)
    gpm            NVML's own counters, Hopper and newer, per GPU instance too
    nvml-process   SM time summed over processes, at most 1; not on MIG

Device utilisation is not SM activity but the share of time in which any kernel ran, so one small
kernel on one SM makes it 100 %. It is reported as a separate figure.

GPM compares two samples, so the first cycle has no figure. The driver allocates the samples, and
the meter keeps them from one cycle to the next and frees them when the device or instance
disappears.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from agent.probes.nvml import Gate
from agent.probes.nvml_errors import DeviceFault, DeviceLost, NvmlError, StaleHandle
from agent.probes.readings import ActivityReading, Degraded
from headroom.contract.gpunode import SM_SOURCES

#: Minimum number of seconds between two GPM samples. NVML recommends at least 100 ms.
GPM_APART_S = 0.1
_SM_UTIL, _SM_OCCUPANCY = 2, 3
_METRICS_VERSION = 1
#: The first query for process samples covers this many microseconds.
_FIRST_WINDOW_US = 1_000_000
#: Counters may add up to slightly more than 1. Higher values are invalid.
_MOST_RATIO = 1.01


def ratio(value: float) -> float | None:
    """Return ``value`` as a ratio 0..1, or None if it is invalid."""
    return min(value, 1.0) if math.isfinite(value) and 0 <= value <= _MOST_RATIO else None


def best(readings: Iterable[ActivityReading]) -> list[ActivityReading]:
    """Combine the readings of each device. Each figure comes from the best source that has it."""
    found: dict[str, ActivityReading] = {}
    rank = {source: number for number, source in enumerate(SM_SOURCES)}
    for reading in sorted(readings, key=lambda r: rank.get(r.source, len(rank))):
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


def _first(known: float | None, other: float | None) -> float | None:
    return other if known is None else known


@dataclass(slots=True)
class _Pair:
    """The two newest GPM samples of a device, which the driver holds."""

    older: Any
    newer: Any
    #: When the newer sample was taken, or -infinity before the first sample.
    taken_s: float
    #: Ratios for the time between the two samples, or None if unknown, for example before the
    #: second sample.
    sm_ratio: float | None = None
    occupancy_ratio: float | None = None


class Meter:
    """Measures one physical GPU and its instances. The class is not thread-safe."""

    def __init__(
        self,
        gate: Gate,
        monotonic: Callable[[], float] = time.monotonic,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._gate = gate
        self._monotonic = monotonic
        self._wall_us = wall_us
        self._uuid = ""
        #: GPM samples of each GPU instance (None for the whole GPU), or None if it has no GPM.
        self._pairs: dict[int | None, _Pair | None] = {}
        #: Time of the newest process sample on the driver's clock, or None before the first query.
        self._seen_us: int | None = None

    def measure(
        self, handle: Any, uuid: str, instances: Mapping[int | None, Collection[str]] | None = None
    ) -> list[ActivityReading | Degraded]:
        """Measure the GPU or its instances.

        ``instances`` maps the number of each GPU instance to the UUIDs of its MIG devices. A
        counter that cannot be read yields a ``Degraded``, and does not affect the device's other
        figures. Raises ``DeviceLost`` and ``DriverGone``.
        """
        if uuid != self._uuid:
            self.free()
            self._uuid = uuid
        counters: dict[str, Callable[[], list[ActivityReading]]] = {
            "gpm": lambda: self._gpm(handle, instances or {None: [uuid]})
        }
        if instances is None:  # NVML measures neither processes nor utilisation of MIG devices.
            counters["nvml-process"] = lambda: self._processes(handle)
            counters["nvml"] = lambda: self._utilization(handle)
        found: list[ActivityReading | Degraded] = []
        for source, read in counters.items():
            try:
                found += read()
            except DeviceLost:
                raise
            except (DeviceFault, StaleHandle) as err:
                found.append(Degraded(source, f"{uuid}: {err}"))
        return found

    def free(self) -> None:
        """Free all GPM samples of this meter in the driver, and forget the last process sample."""
        for instance in [*self._pairs]:
            self._free(instance)
        self._seen_us = None

    def _gpm(
        self, handle: Any, instances: Mapping[int | None, Collection[str]]
    ) -> list[ActivityReading]:
        """Return GPM's figures, and free the samples of instances that no longer exist."""
        for instance in self._pairs.keys() - instances.keys():
            self._free(instance)
        found: list[ActivityReading] = []
        for instance, devices in instances.items():
            if (pair := self._pair(instance, handle)) is not None:
                sm, occupancy = pair.sm_ratio, pair.occupancy_ratio
                found += [ActivityReading("gpm", device, sm, occupancy) for device in devices]
        return found

    def _pair(self, instance: int | None, handle: Any) -> _Pair | None:
        """Take a sample unless the last sample is too new, and return the pair of samples.

        ``instance`` is None for the whole GPU. Return None if it has no GPM.
        """
        if instance not in self._pairs:
            support = self._gate.ask("nvmlGpmQueryDeviceSupport", handle)
            pair = None
            if support is not None and support.isSupportedDevice:
                pair = self._allocated()
            self._pairs[instance] = pair
        pair = self._pairs[instance]
        if pair is None or self._monotonic() - pair.taken_s < GPM_APART_S:
            return pair
        is_first = pair.taken_s == -math.inf
        try:
            # Overwrites the older sample.
            if instance is None:
                taken = self._gate.ask("nvmlGpmSampleGet", handle, pair.older)
            else:
                taken = self._gate.ask("nvmlGpmMigSampleGet", handle, instance, pair.older)
        except NvmlError:
            self._free(instance)  # The failed call may have left garbage in the sample.
            raise
        if taken is None:
            self._free(instance)
            self._pairs[instance] = None  # the device has GPM, but not this instance
            return None
        pair.older, pair.newer = pair.newer, pair.older
        pair.taken_s = self._monotonic()
        if not is_first:
            pair.sm_ratio, pair.occupancy_ratio = self._compare(pair)
        return pair

    def _compare(self, pair: _Pair) -> tuple[float | None, float | None]:
        """Return the ratios of SM activity and occupancy between the two samples."""
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

    def _allocated(self) -> _Pair | None:
        """Allocate two samples. If NVML can allocate only the first sample, free it and return
        None."""
        older = self._gate.ask("nvmlGpmSampleAlloc")
        if older is None:
            return None
        newer = None
        try:
            newer = self._gate.ask("nvmlGpmSampleAlloc")
        finally:
            if newer is None:
                self._free_sample(older)
        return None if newer is None else _Pair(older, newer, -math.inf)

    def _free_sample(self, sample: Any) -> None:
        with contextlib.suppress(NvmlError):  # the driver is gone, and so is the sample's memory
            self._gate.ask("nvmlGpmSampleFree", sample)

    def _free(self, instance: int | None) -> None:
        pair = self._pairs.pop(instance)
        for sample in () if pair is None else (pair.older, pair.newer):
            self._free_sample(sample)

    def _processes(self, handle: Any) -> list[ActivityReading]:
        """Return the SM time of the processes since the last query, or nothing if it is not
        measured."""
        now_us = self._wall_us()
        since_us = now_us if self._seen_us is None else self._seen_us
        if since_us >= now_us:  # This is the first query, or the wall clock was set back.
            since_us = now_us - _FIRST_WINDOW_US
        samples = self._gate.process_samples(handle, since_us)
        if samples is None:
            return []
        newest: dict[int, tuple[int, float]] = {}
        for pid, at_us, percent in samples:
            share = ratio(percent / 100)
            if share is not None:
                newest[pid] = max(newest.get(pid, (0, 0.0)), (at_us, share))
        self._seen_us = max([since_us, *(at_us for at_us, _ in newest.values())])
        by_pid = {pid: share for pid, (_, share) in newest.items()}
        total = min(1.0, sum(by_pid.values()))
        return [ActivityReading("nvml-process", self._uuid, sm_ratio=total, sm_by_pid=by_pid)]

    def _utilization(self, handle: Any) -> list[ActivityReading]:
        rates = self._gate.ask("nvmlDeviceGetUtilizationRates", handle)
        if rates is None:
            return []
        return [ActivityReading("nvml", self._uuid, utilization_ratio=ratio(rates.gpu / 100))]
