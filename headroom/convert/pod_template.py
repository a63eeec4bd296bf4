"""Converts one pod template: replaces requests to KAI, HAMi or gpushare with Headroom's annotation.

A template that requests memory from two of these allocators, or has a value that cannot be read, is
not changed. If it were converted in part, the pod would run with the wrong amount of memory.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from headroom.contract.annotations import (
    POLICY,
    PPM,
    VRAM,
    Bytes,
    Share,
    VramAnnotation,
    render_vram,
)
from headroom.convert.allocators import (
    GPU,
    GPUSHARE_MEMORY,
    HAMI_MEMORY,
    HAMI_NODE_POLICY,
    HAMI_PERCENT,
    HAMI_RESOURCES,
    KAI_REQUESTS,
    LOST_RESOURCES,
    MIB,
    NV_FRACTION,
    POLICIES,
    SCHEDULERS,
    STAMPS,
    BadValue,
    ForeignRequest,
    count,
    fraction,
    in_units,
    lost_annotation,
    lost_resource,
    percentage,
    quantity,
    unread_in,
)
from headroom.convert.findings import Finding, Outcome, several_devices

Yaml = MutableMapping[str, Any]


@dataclass(slots=True)
class Template:
    """One pod template. ``pod`` contains its metadata and spec, and is changed in place."""

    pod: Yaml
    where: str
    memory_unit_bytes: int
    scheduler_name: str | None
    #: Name and namespace of the object with the template; empty if it has none.
    name: str = ""
    namespace: str = ""
    findings: list[Finding] = field(default_factory=list)
    #: The request of each container to another allocator, by the container's name.
    _requests: dict[str, ForeignRequest] = field(default_factory=dict)
    _allocators: set[str] = field(default_factory=set)

    def convert(self) -> bool:
        """Convert the template in place, and add findings. Return whether anything was changed."""
        try:
            self._read()
        except BadValue as err:
            self._report(Outcome.NOT_UNDERSTOOD, None, f"not changed: {err}")
            return False
        self._report_whole_gpus()
        changed = self._remove_keys()
        if self._requests:
            self._write_requests()
            changed = True
        changed |= self._set_scheduler()
        if changed:
            for name, why in unread_in(self.pod["spec"]):
                self._report(Outcome.LOST, None, f"{name}: {why}")
        return changed

    # Reading, which changes nothing.

    def _read(self) -> None:
        """Record the requests of all containers. Raise ``BadValue`` if the template cannot be
        converted."""
        self._read_kai()
        self._read_nv_fractions()
        for container in self._containers():
            self._read_resources(container)
        if len(self._allocators) > 1:
            raise BadValue(f"it requests memory from {' and '.join(sorted(self._allocators))}")
        if self._allocators and VRAM in self._annotations():
            raise BadValue(f"it already has annotation {VRAM}")

    def _read_kai(self) -> None:
        annotations = self._annotations()
        shares = [key for key in ("gpu-fraction", "gpu-memory") if key in annotations]
        if len(shares) > 1:
            raise BadValue("it has both gpu-fraction and gpu-memory")
        if not shares:
            if others := [key for key in KAI_REQUESTS if key in annotations]:
                raise BadValue(f"it has {others[0]} without gpu-fraction or gpu-memory")
            return
        key = shares[0]
        amount = self._value(annotations, key, fraction if key == "gpu-fraction" else _mib)
        if amount is None:
            raise BadValue(f"{key} is 0")
        devices = 1
        if "gpu-fraction-num-devices" in annotations:
            devices = self._value(annotations, "gpu-fraction-num-devices", count)
        names = [str(c["name"]) for c in self._containers(init=False)]
        name = str(annotations.get("gpu-fraction-container-name", names[0]))
        if name not in [str(c["name"]) for c in self._containers()]:
            raise BadValue(f"gpu-fraction-container-name names no container: {name!r:.80}")
        self._add("KAI", name, ForeignRequest(amount, devices))

    def _read_nv_fractions(self) -> None:
        annotations = self._annotations()
        #: The annotation's key for each container name, and then for "request" or "limit".
        keys_of: dict[str, dict[str, str]] = {}
        for key in annotations:
            match = NV_FRACTION.fullmatch(str(key))
            if match:
                keys_of.setdefault(match[1], {})[match[2].rpartition(".")[2]] = str(key)
            elif str(key).startswith("nvidia.com/container.") and not (
                STAMPS.fullmatch(str(key)) or lost_annotation(str(key))
            ):
                raise BadValue(f"annotation {key} is not known")
        known = [str(c["name"]) for c in self._containers()]
        for name, keys in keys_of.items():
            if name not in known:
                raise BadValue(f"{next(iter(keys.values()))} names no container")
            # The limit is the memory that the container can use. The request may be smaller.
            key = keys.get("limit") or keys["request"]
            amount = self._value(annotations, key, quantity)
            if amount is None:
                raise BadValue(f"{key} is 0")
            if len(keys) > 1 and self._value(annotations, keys["request"], quantity) != amount:
                self._report(
                    Outcome.CHANGED,
                    line_of(annotations, keys["request"]),
                    f"{keys['request']} differs from the limit; Headroom reserves the limit",
                )
            self._add("KAI", name, ForeignRequest(amount))

    def _read_resources(self, container: Yaml) -> None:
        asked = {**_part(container, "requests"), **_part(container, "limits")}
        name = str(container["name"])
        hami = [k for k in HAMI_RESOURCES if k in asked]
        if hami:
            devices = self._value(asked, GPU, count) if GPU in asked else 1
            amount: Bytes | Share | None = None
            if HAMI_MEMORY in asked:
                amount = self._value(asked, HAMI_MEMORY, _mib)
            if HAMI_PERCENT in asked:
                line, percent = line_of(asked, HAMI_PERCENT), asked[HAMI_PERCENT]
                if amount is not None:
                    message = f"{HAMI_PERCENT}: {percent}: removed, because HAMi uses {HAMI_MEMORY}"
                    self._report(Outcome.CHANGED, line, message)
                elif str(percent).strip() != "0":
                    amount = self._value(asked, HAMI_PERCENT, percentage)
            if amount is None:
                zero = next((f"{k}: 0" for k in (HAMI_PERCENT, HAMI_MEMORY) if k in asked), "")
                self._report(
                    Outcome.CHANGED,
                    line_of(container, "name"),
                    f"container {name}: {zero or 'no amount of memory'}: HAMi sets no limit, "
                    "or its defaultMemory; headroom.gpu/vram is 100% of the GPU",
                )
            self._add("HAMi", name, ForeignRequest(amount or Share(PPM), devices))
        if GPUSHARE_MEMORY in asked:
            unit_bytes = self.memory_unit_bytes
            try:
                units = self._value(asked, GPUSHARE_MEMORY, lambda v: in_units(v, unit_bytes))
            except BadValue as err:
                raise BadValue(f"{err}. Set its unit with --memory-unit") from err
            if units is None:
                message = f"{GPUSHARE_MEMORY}: 0: removed, because it requests nothing"
                self._report(Outcome.CHANGED, line_of(asked, GPUSHARE_MEMORY), message)
            else:
                self._add("gpushare", name, ForeignRequest(units))
                unit, other = ("GiB", "MiB") if unit_bytes > MIB else ("MiB", "GiB")
                self._report(
                    Outcome.CHANGED,
                    line_of(asked, GPUSHARE_MEMORY),
                    f"{GPUSHARE_MEMORY}: {asked[GPUSHARE_MEMORY]} was read as {unit}; "
                    f"if gpushare's plugin counts {other}, use --memory-unit {other}",
                )

    def _add(self, allocator: str, name: str, request: ForeignRequest) -> None:
        """Record the request of container ``name``. Raise ``BadValue`` if the container already has
        a request.
        """
        if name in self._requests:
            raise BadValue(f"container {name!r:.80} has two requests for memory")
        own = next(c for c in self._containers() if c["name"] == name)
        if allocator != "HAMi" and (GPU in _part(own, "limits") or GPU in _part(own, "requests")):
            raise BadValue(
                f"container {name!r:.80} requests {GPU} and a part of a GPU; remove one of them"
            )
        self._allocators.add(allocator)
        self._requests[name] = request

    def _value(self, mapping: Yaml, key: str, read: Any) -> Any:
        """Convert the value of ``key`` with ``read``. Errors name the key."""
        try:
            return read(mapping[key])
        except BadValue as err:
            raise BadValue(f"{key}: {err}") from err

    # Writing.

    def _remove_keys(self) -> bool:
        """Remove the keys of other allocators, and report keys without an equivalent. Return
        whether anything was removed."""
        changed = False
        annotations, labels = self._annotations(), self._labels()
        for part, key in [*((annotations, k) for k in annotations), *((labels, k) for k in labels)]:
            name, line = str(key), line_of(part, key)
            if part is annotations and name == HAMI_NODE_POLICY and part[key] in POLICIES:
                policy = annotations.setdefault(POLICY, POLICIES[part[key]])
                message = f"{name}: {part[key]}: replaced by {POLICY}: {policy}"
                self._report(Outcome.CHANGED, line, message)
            elif part is annotations and (why := lost_annotation(name, part[key])):
                if str(part[key] or "").strip(" ,"):
                    self._report(Outcome.LOST, line, f"{name}: {why}")
                else:
                    message = f"{name}: removed, because it is empty and has no effect"
                    self._report(Outcome.CHANGED, line, message)
            elif STAMPS.fullmatch(name):
                message = f"{name}: removed; another allocator writes it when it places a pod"
                self._report(Outcome.CHANGED, line, message)
            elif part is labels or not (name in KAI_REQUESTS or NV_FRACTION.fullmatch(name)):
                continue
            del part[key]
            changed = True
        for container in self._containers():
            changed |= self._remove_resources(container)
            for env in container.get("env") or ():
                if isinstance(env, dict) and env.get("name") == "NVIDIA_VISIBLE_DEVICES":
                    self._report(
                        Outcome.LOST,
                        line_of(env, "name"),
                        "NVIDIA_VISIBLE_DEVICES: can give the container devices that were not "
                        "allocated to it; remove it",
                    )
        return changed

    def _remove_resources(self, container: Yaml) -> bool:
        """Remove the resources of other allocators. Return whether there were any."""
        changed = False
        reported: set[str] = set()
        resources = container.get("resources") or {}
        for part in ("limits", "requests"):
            asked = resources.get(part) or {}
            for key in list(asked):
                if key in LOST_RESOURCES and key not in reported:
                    reported.add(key)
                    own = self._requests.get(str(container["name"]))
                    is_whole = own is not None and own.amount == Share(PPM)
                    is_lost, why = lost_resource(key, asked[key], is_whole)
                    outcome = Outcome.LOST if is_lost else Outcome.CHANGED
                    self._report(outcome, line_of(asked, key), f"{key}: {why}")
                if key in LOST_RESOURCES or key in (HAMI_MEMORY, HAMI_PERCENT, GPUSHARE_MEMORY):
                    del asked[key]
                    changed = True
            if changed and part == "requests" and part in resources and not asked:
                del resources[part]
        return changed

    def _report_whole_gpus(self) -> None:
        """Report containers to which KAI or HAMi gives a whole GPU, because they do not request a
        part of a GPU."""
        theirs = self._allocators | {SCHEDULERS.get(str(self.pod["spec"].get("schedulerName")), "")}
        for allocator in sorted(theirs & set(SCHEDULERS.values())):
            for container in self._containers():
                name = str(container["name"])
                if name in self._gpu_containers() - self._requests.keys():
                    self._report(
                        Outcome.CHANGED,
                        line_of(container, "name"),
                        f"container {name}: {allocator} gives it a whole GPU; on a shared GPU, "
                        "Headroom reserves the memory of one replica, or all memory with "
                        f"{VRAM}: 100%",
                    )

    def _write_requests(self) -> None:
        """Write the number of GPUs of each container, and the pod's annotation ``VRAM``."""
        for container in self._containers():
            request = self._requests.get(str(container["name"]))
            if request is not None:
                resources = mapping(container, "resources")
                mapping(resources, "limits")[GPU] = request.devices
                if GPU in _part(container, "requests"):
                    resources["requests"][GPU] = request.devices
                if request.devices > 1:
                    self._report(
                        Outcome.CHANGED,
                        line_of(container, "name"),
                        several_devices(str(container["name"]), request.devices),
                    )
        amounts = {name: request.amount for name, request in self._requests.items()}
        is_same = len(set(amounts.values())) == 1 and self._gpu_containers() == amounts.keys()
        vram = (
            VramAnnotation(everywhere=next(iter(amounts.values())))
            if is_same
            else VramAnnotation(by_container=amounts)
        )
        text = render_vram(vram)
        if any(isinstance(amount, Share) for amount in amounts.values()):
            self._report(
                Outcome.CHANGED,
                None,
                f"{VRAM}: {text}: the share refers to the memory that pods can reserve; before, it "
                "included the driver's part of the device",
            )
        mapping(mapping(self.pod, "metadata"), "annotations")[VRAM] = text

    def _set_scheduler(self) -> bool:
        """Set or remove ``schedulerName`` of a pod that requests a GPU. Return whether it
        changed."""
        spec = self.pod["spec"]
        theirs = SCHEDULERS.get(str(spec.get("schedulerName", "")))
        line = line_of(spec, "schedulerName")
        if theirs is not None and not self._requests and not self._gpu_containers():
            self._report(
                Outcome.CHANGED,
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
            self._report(Outcome.CHANGED, line, f"schedulerName: {theirs}'s {change}")
        elif not self._requests:
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

    def _gpu_containers(self) -> set[str]:
        """Return the names of the containers that now request a GPU."""
        return {
            str(c["name"])
            for c in self._containers()
            if GPU in _part(c, "limits") or GPU in _part(c, "requests")
        }

    def _report(self, outcome: Outcome, line: int | None, message: str) -> None:
        """Add a finding. Its default line is the line of the pod's spec."""
        self.findings.append(
            Finding(outcome, line or line_of(self.pod, "spec"), self.where, message)
        )


def _mib(value: object) -> Bytes | None:
    return in_units(value, MIB)


def _part(container: Yaml, part: str) -> Yaml:
    """Return the container's ``limits`` or ``requests``, or {} if there are none."""
    return (container.get("resources") or {}).get(part) or {}


def mapping(parent: Yaml, key: str) -> Yaml:
    """Return the mapping under ``key``. Create it if it is missing."""
    if not parent.get(key):
        parent[key] = {}
    found: Yaml = parent[key]
    return found


def line_of(of: Any, key: object) -> int | None:
    """Return the line of the key in the file, from 1, or None if it has none."""
    try:
        return int(of.lc.key(key)[0]) + 1
    except (AttributeError, KeyError, TypeError):
        return None
