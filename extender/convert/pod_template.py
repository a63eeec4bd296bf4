"""Converts one pod template: replaces requests to KAI, HAMi or gpushare with Headroom's annotation.

A template that uses two of these allocators, or has a value that cannot be read, is not changed: a
pod that is only partly converted would run with the wrong amount of memory.
"""

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from contract.annotations import PPM, VRAM, Bytes, Share, VramAnnotation, render_vram
from extender.convert.remarks import Finding, Weight
from extender.convert.requests import (
    MIB,
    TheirAsk,
    Unreadable,
    count,
    fraction,
    in_units,
    percentage,
    quantity,
)

GPU = "nvidia.com/gpu"
Yaml = MutableMapping[str, Any]

#: Schedulers that exist only for their own kind of sharing.
SCHEDULERS = {"kai-scheduler": "KAI", "hami-scheduler": "HAMi"}

KAI_ASKS = ("gpu-fraction", "gpu-memory", "gpu-fraction-num-devices", "gpu-fraction-container-name")
_NV_FRACTION = re.compile(r"nvidia\.com/container\.(.+)\.(gpu-memory\.(?:request|limit))")
HAMI_MEMORY, HAMI_PERCENT = "nvidia.com/gpumem", "nvidia.com/gpumem-percentage"
HAMI_RESOURCES = (HAMI_MEMORY, HAMI_PERCENT, "nvidia.com/gpucores", "nvidia.com/priority")
GPUSHARE_MEMORY = "aliyun.com/gpu-mem"

_NO_COMPUTE = (
    "Headroom does not divide compute; annotation headroom.gpu/max-sm keeps a pod off busy devices"
)
#: Resource or annotation without an equivalent -> the reason. They are removed.
LOST_RESOURCES = {
    "nvidia.com/gpucores": _NO_COMPUTE,
    "nvidia.com/priority": "Headroom has no priority between pods on one device",
    "aliyun.com/gpu-core.percentage": _NO_COMPUTE,
}
LOST_ANNOTATIONS = {
    "gpu-fraction-limit": "a pod may not use more memory than it requests",
    "gpu-memory-limit": "a pod may not use more memory than it requests",
    "mps": "MPS is configured in the device plugin of the node",
    "nvidia.com/use-gputype": "select nodes by label nvidia.com/gpu.product instead",
    "nvidia.com/nouse-gputype": "select nodes by label nvidia.com/gpu.product instead",
    "nvidia.com/use-gpuuuid": "a pod cannot choose a device by its uuid",
    "nvidia.com/nouse-gpuuuid": "a pod cannot choose a device by its uuid",
    "nvidia.com/vgpu-mode": "sharing is configured in the device plugin of the node",
    "hami.io/gpu-scheduler-policy": "annotation headroom.gpu/policy: pack or spread is similar",
    "hami.io/node-scheduler-policy": "annotation headroom.gpu/policy: pack or spread is similar",
}
#: Labels that are reported but kept, because a selector may depend on them.
QUEUES = ("kai.scheduler/queue", "runai/queue")
#: Annotations and labels that another allocator writes when it places a pod. A manifest has them
#: only as a copy of such a pod. A bound pod with one of them makes its node ineligible.
_STAMPS = re.compile(
    r"ALIYUN_COM_GPU_MEM_.*|hami\.io/(vgpu-.*|bind-.*)|runai-gpu-group(/.*)?|run\.ai/.*"
    r"|runai/shared-gpu-configmap|received-resource-type|nvidia\.com/container\..+\.gpus\.devices"
)


#: Prefix of a resource -> its allocator, which is not converted.
_UNCONVERTED = {"volcano.sh/vgpu-": "Volcano", "tencent.com/vcuda-": "Tencent's GPU manager"}


def unconverted(key: object) -> str:
    """Return the name of the allocator of a key that is not converted; empty for other keys."""
    known = _UNCONVERTED.items()
    return next((name for prefix, name in known if str(key).startswith(prefix)), "")


def is_theirs(key: object) -> bool:
    """Return whether a key, anywhere in a manifest, belongs to an allocator that is converted."""
    return isinstance(key, str) and (
        key in KAI_ASKS
        or key in (HAMI_MEMORY, HAMI_PERCENT, GPUSHARE_MEMORY, "aliyun.com/gpu-count")
        or key in LOST_RESOURCES
        # "mps" is too common a word to search for outside annotations.
        or (key in LOST_ANNOTATIONS and key != "mps")
        or key.startswith("nvidia.com/container.")
    )


@dataclass(slots=True)
class Template:
    """One pod template: ``pod`` holds its metadata and spec and is changed in place."""

    pod: Yaml
    where: str
    memory_unit_bytes: int
    scheduler_name: str | None
    findings: list[Finding] = field(default_factory=list)
    #: Container name -> its request to the other allocator.
    _asks: dict[str, TheirAsk] = field(default_factory=dict)
    _allocators: set[str] = field(default_factory=set)

    def convert(self) -> bool:
        """Convert the template in place. Return whether anything was changed."""
        try:
            self._read()
        except Unreadable as err:
            self._find(Weight.NOT_UNDERSTOOD, None, f"not changed: {err}")
            return False
        changed = self._take_out()
        if self._asks:
            self._write()
            changed = True
        return self._reschedule() or changed

    # Reading; nothing is changed here.

    def _read(self) -> None:
        self._read_kai()
        self._read_nv_fractions()
        for container in self._containers():
            self._read_resources(container)
        if len(self._allocators) > 1:
            raise Unreadable(f"it requests memory from {' and '.join(sorted(self._allocators))}")
        if self._allocators and VRAM in self._annotations():
            raise Unreadable(f"it already has annotation {VRAM}")

    def _read_kai(self) -> None:
        annotations = self._annotations()
        shares = [key for key in ("gpu-fraction", "gpu-memory") if key in annotations]
        if len(shares) > 1:
            raise Unreadable("it has both gpu-fraction and gpu-memory")
        if not shares:
            if others := [key for key in KAI_ASKS if key in annotations]:
                raise Unreadable(f"it has {others[0]} without gpu-fraction or gpu-memory")
            return
        key = shares[0]
        amount = self._value(annotations, key, fraction if key == "gpu-fraction" else _mib)
        if amount is None:
            raise Unreadable(f"{key} is 0")
        devices = 1
        if "gpu-fraction-num-devices" in annotations:
            devices = self._value(annotations, "gpu-fraction-num-devices", count)
        names = [str(c["name"]) for c in self._containers(init=False)]
        name = str(annotations.get("gpu-fraction-container-name", names[0]))
        if name not in [str(c["name"]) for c in self._containers()]:
            raise Unreadable(f"gpu-fraction-container-name names no container: {name!r:.80}")
        self._add("KAI", name, TheirAsk(amount, devices))

    def _read_nv_fractions(self) -> None:
        annotations = self._annotations()
        figures: dict[str, dict[str, str]] = {}
        for key in annotations:
            match = _NV_FRACTION.fullmatch(str(key))
            if match:
                figures.setdefault(match[1], {})[match[2].rpartition(".")[2]] = str(key)
            elif str(key).startswith("nvidia.com/container.") and not _STAMPS.fullmatch(str(key)):
                raise Unreadable(f"annotation {key} is not known")
        known = [str(c["name"]) for c in self._containers()]
        for name, keys in figures.items():
            if name not in known:
                raise Unreadable(f"{next(iter(keys.values()))} names no container")
            # The limit is the memory that the container can use; the request may be less.
            key = keys.get("limit") or keys["request"]
            amount = self._value(annotations, key, quantity)
            if amount is None:
                raise Unreadable(f"{key} is 0")
            if len(keys) > 1 and self._value(annotations, keys["request"], quantity) != amount:
                self._find(
                    Weight.CHANGED,
                    _line(annotations, keys["request"]),
                    f"{keys['request']} is less than the limit; Headroom reserves the limit",
                )
            self._add("KAI", name, TheirAsk(amount))

    def _read_resources(self, container: Yaml) -> None:
        asked = {**_part(container, "requests"), **_part(container, "limits")}
        name = str(container["name"])
        hami = [k for k in HAMI_RESOURCES if k in asked]
        if hami:
            devices = self._value(asked, GPU, count) if GPU in asked else 1
            amount: Bytes | Share | None = None
            if HAMI_MEMORY in asked:
                amount = self._value(asked, HAMI_MEMORY, _mib)
            if amount is None and str(asked.get(HAMI_PERCENT, "0")).strip() != "0":
                amount = self._value(asked, HAMI_PERCENT, percentage)
            # HAMi gives a container without an amount the whole device.
            self._add("HAMi", name, TheirAsk(amount or Share(PPM), devices))
        if GPUSHARE_MEMORY in asked:
            unit_bytes = self.memory_unit_bytes
            try:
                units = self._value(asked, GPUSHARE_MEMORY, lambda v: in_units(v, unit_bytes))
            except Unreadable as err:
                raise Unreadable(f"{err}. Set its unit with --memory-unit") from err
            if units is not None:
                self._add("gpushare", name, TheirAsk(units))
                unit, other = ("GiB", "MiB") if unit_bytes > MIB else ("MiB", "GiB")
                self._find(
                    Weight.CHANGED,
                    _line(asked, GPUSHARE_MEMORY),
                    f"{GPUSHARE_MEMORY}: {asked[GPUSHARE_MEMORY]} was read as {unit}; "
                    f"if gpushare's plugin counts {other}, use --memory-unit {other}",
                )

    def _add(self, allocator: str, name: str, ask: TheirAsk) -> None:
        if name in self._asks:
            raise Unreadable(f"container {name!r:.80} has two requests for memory")
        own = next(c for c in self._containers() if c["name"] == name)
        if allocator != "HAMi" and (GPU in _part(own, "limits") or GPU in _part(own, "requests")):
            raise Unreadable(
                f"container {name!r:.80} requests {GPU} and a part of a GPU; remove one of them"
            )
        self._allocators.add(allocator)
        self._asks[name] = ask

    def _value(self, among: Yaml, key: str, read: Any) -> Any:
        try:
            return read(among[key])
        except Unreadable as err:
            raise Unreadable(f"{key}: {err}") from err

    # Writing.

    def _take_out(self) -> bool:
        """Remove the keys of other allocators, and report those without an equivalent."""
        changed = False
        annotations, labels = self._annotations(), self._labels()
        for part, key in [*((annotations, k) for k in annotations), *((labels, k) for k in labels)]:
            name, line = str(key), _line(part, key)
            if part is annotations and name in LOST_ANNOTATIONS:
                self._find(Weight.LOST, line, f"{name}: {LOST_ANNOTATIONS[name]}")
            elif _STAMPS.fullmatch(name):
                self._find(
                    Weight.LOST, line, f"{name}: another allocator writes it when it places a pod"
                )
            elif part is labels or not (name in KAI_ASKS or _NV_FRACTION.fullmatch(name)):
                if part is labels and name in QUEUES:
                    self._find(
                        Weight.LOST, line, f"{name}: Headroom has no queues; the label was kept"
                    )
                continue
            del part[key]
            changed = True
        for container in self._containers():
            changed |= self._take_out_resources(container)
            for env in container.get("env") or ():
                if isinstance(env, dict) and env.get("name") == "NVIDIA_VISIBLE_DEVICES":
                    self._find(
                        Weight.LOST,
                        _line(env, "name"),
                        "NVIDIA_VISIBLE_DEVICES: can give the container devices that were not "
                        "allocated to it; remove it",
                    )
        return changed

    def _take_out_resources(self, container: Yaml) -> bool:
        changed = False
        reported: set[str] = set()
        resources = container.get("resources") or {}
        for part in ("limits", "requests"):
            asked = resources.get(part) or {}
            for key in list(asked):
                if key in LOST_RESOURCES and key not in reported:
                    reported.add(key)
                    self._find(Weight.LOST, _line(asked, key), f"{key}: {LOST_RESOURCES[key]}")
                if key in LOST_RESOURCES or key in (HAMI_MEMORY, HAMI_PERCENT, GPUSHARE_MEMORY):
                    del asked[key]
                    changed = True
            if changed and part == "requests" and part in resources and not asked:
                del resources[part]
        return changed

    def _write(self) -> None:
        for container in self._containers():
            ask = self._asks.get(str(container["name"]))
            if ask is not None:
                resources = _mapping(container, "resources")
                _mapping(resources, "limits")[GPU] = ask.devices
                if GPU in _part(container, "requests"):
                    resources["requests"][GPU] = ask.devices
                if ask.devices > 1:
                    self._find(
                        Weight.CHANGED,
                        _line(container, "name"),
                        f"container {container['name']}: {ask.devices} devices; if GPUs are "
                        "shared, the container can get two replicas of one device",
                    )
        amounts = {name: ask.amount for name, ask in self._asks.items()}
        alike = len(set(amounts.values())) == 1 and self._holders() == amounts.keys()
        vram = (
            VramAnnotation(everywhere=next(iter(amounts.values())))
            if alike
            else VramAnnotation(by_container=amounts)
        )
        text = render_vram(vram)
        if any(isinstance(amount, Share) for amount in amounts.values()):
            self._find(
                Weight.CHANGED,
                None,
                f"{VRAM}: {text}: the share refers to the memory that pods can reserve; before, it "
                "included the driver's part of the device",
            )
        _mapping(_mapping(self.pod, "metadata"), "annotations")[VRAM] = text

    def _reschedule(self) -> bool:
        spec = self.pod["spec"]
        theirs = SCHEDULERS.get(str(spec.get("schedulerName", "")))
        line = _line(spec, "schedulerName")
        if theirs is not None and not self._asks and not self._holders():
            self._find(
                Weight.CHANGED,
                line,
                f"schedulerName: {theirs}'s was kept, because the pod does not request {GPU}",
            )
            return False
        if theirs is not None:
            change = f"was replaced with {self.scheduler_name}"
            if not self.scheduler_name:
                change = (
                    "was removed, so the cluster's default applies; --scheduler-name NAME sets "
                    "another"
                )
            self._find(Weight.CHANGED, line, f"schedulerName: {theirs}'s {change}")
        elif not self._asks:
            return False
        if self.scheduler_name:
            spec["schedulerName"] = self.scheduler_name
        elif theirs is not None:
            del spec["schedulerName"]
        return theirs is not None or bool(self.scheduler_name)

    # Access to the template.

    def _annotations(self) -> Yaml:
        return (self.pod.get("metadata") or {}).get("annotations") or {}

    def _labels(self) -> Yaml:
        return (self.pod.get("metadata") or {}).get("labels") or {}

    def _containers(self, init: bool = True) -> Iterator[Yaml]:
        spec = self.pod["spec"]
        for part in ("initContainers", "containers") if init else ("containers",):
            yield from spec.get(part) or ()

    def _holders(self) -> set[str]:
        """Return the names of the containers that now request a GPU."""
        return {
            str(c["name"])
            for c in self._containers()
            if GPU in _part(c, "limits") or GPU in _part(c, "requests")
        }

    def _find(self, weight: Weight, line: int | None, message: str) -> None:
        self.findings.append(Finding(weight, line or _line(self.pod, "spec"), self.where, message))


def _mib(value: object) -> Bytes | None:
    return in_units(value, MIB)


def _part(container: Yaml, part: str) -> Yaml:
    return (container.get("resources") or {}).get(part) or {}


def _mapping(parent: Yaml, key: str) -> Yaml:
    """Return the mapping under ``key``; create it if it is missing."""
    if not parent.get(key):
        parent[key] = {}
    found: Yaml = parent[key]
    return found


def _line(mapping: Any, key: object) -> int | None:
    """Return the line of the key in the file, from 1; None if it has none."""
    try:
        return int(mapping.lc.key(key)[0]) + 1
    except (AttributeError, KeyError, TypeError):
        return None
