"""Parses the values of Headroom's annotations on pods, namespaces and nodes.

``contract.keys`` defines and describes the names, and this module exports them too.

Parsers raise ``BadAnnotation`` with the key, the value and a valid example. Amounts are integers,
in bytes or in parts per million. Amounts in bytes are at most ``MAX_DEVICE_BYTES``, so that their
sums fit into int64.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TypeVar

from headroom.contract.corrections import with_example
from headroom.contract.errors import BadAnnotation, BadQuantity
from headroom.contract.keys import *  # noqa: F403
from headroom.contract.keys import (
    BYTES,
    CORDON,
    DEVICE_CHOICE,
    DEVICES,
    FRACTION,
    GATED,
    LIMIT_BYTES,
    LIMIT_FRACTION,
    MAINTENANCE,
    MAX_SM,
    ON_OVERUSE,
    PLACEMENT,
    POLICY,
    PREEMPTING,
    PROCESSES,
    RESERVE,
    RETRY,
    SHARE,
    STARTUP,
    STARTUP_TIMEOUT,
    TOUCHED,
    UNIFIED_MEMORY,
    VRAM,
    VRAM_FROM,
    VRAM_LIMIT,
    VRAM_REQUESTED,
)
from headroom.contract.quantity import MAX_DEVICE_BYTES, format_bytes, parse_bytes

#: Pod annotations that users may write. The webhook writes ``VRAM_FROM`` and may write ``VRAM``.
USER_ANNOTATIONS = (
    *(VRAM, VRAM_LIMIT, POLICY, MAX_SM, PROCESSES, ON_OVERUSE, GATED, SHARE),
    *(STARTUP, STARTUP_TIMEOUT, VRAM_FROM, VRAM_REQUESTED),
)
#: Pod annotations that only extenders write.
EXTENDER_ANNOTATIONS = (PLACEMENT, RETRY, PREEMPTING, TOUCHED)
#: Prefixes of pod annotations that only extenders write. The index of a container follows the
#: prefix.
EXTENDER_ANNOTATION_PREFIXES = (DEVICES, BYTES, FRACTION, LIMIT_BYTES, LIMIT_FRACTION)

#: Parts per million in a whole.
PPM = 1_000_000
Choice = TypeVar("Choice", bound=Enum)
MAX_PROCESSES = 1024
#: Timeout in seconds of a start without ``STARTUP_TIMEOUT``, and the maximum timeout.
STARTUP_TIMEOUT_S, MAX_STARTUP_TIMEOUT_S = 600, 86_400
#: Maximum number of cordoned devices of a node. MIG divides each of 16 GPUs into at most seven
#: devices.
MAX_CORDONED = 128
CORDON_EXAMPLE = "GPU-5fd9a1c4-3c3e-4f5a-9a57-0f4e7d1b2c3d"
_DEVICE_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")


@dataclass(frozen=True, slots=True)
class Bytes:
    """A fixed amount of VRAM on each device."""

    count_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the device's allocatable memory, in parts per million."""

    ppm: int


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """The memory of one replica of the device: allocatable / replicas.

    On an unshared device this is its whole memory, so no other pod fits on it beside this pod.
    """

    #: Number of processes in the container. On a device shared by MPS, each of them may use this
    #: memory.
    processes: int = 1


Amount = Bytes | Share | ReplicaShare


@dataclass(frozen=True, slots=True)
class Auto:
    """A request that the webhook replaces by the recommendation when the pod is created."""

    #: Limits of the recommendation, in bytes.
    min_bytes: int = 0
    max_bytes: int = MAX_DEVICE_BYTES
    #: Amount that is used while there is no recommendation.
    default: Bytes | Share | None = None


class ScoringPolicy(Enum):
    PACK = "pack"
    SPREAD = "spread"
    FRAGMENTATION = "fragmentation"


class OnOveruse(Enum):
    REPORT = "report"
    #: Evict the pod if other pods on the device lack memory that they have reserved.
    EVICT = "evict"


class Startup(Enum):
    ALONE = "alone"


class DeviceChoice(Enum):
    PREDICTED = "predicted"
    GATED = "gated"
    STEERED = "steered"


#: Device choices that were removed.
_REMOVED_CHOICES = ("any", "pinned")


class ShareMode(Enum):
    NONE = "none"
    #: Set variables that contain the container's share of each device.
    ENV = "env"
    #: Also set the variables through which the driver or MPS enforces the share, if it can.
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class VramAnnotation:
    """Either one amount for all GPU containers (``everywhere``), or amounts by container name."""

    everywhere: Bytes | Share | None = None
    by_container: Mapping[str, Bytes | Share] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, container: str) -> Bytes | Share | None:
        """Return the amount for one container, or None if the annotation does not name it."""
        return self.everywhere if self.everywhere is not None else self.by_container.get(container)


_PERCENT = re.compile(r"(\d{1,3})(?:\.(\d{1,4}))?%", re.ASCII)
_DURATION = re.compile(r"(?:(\d{1,2})h)?(?:(\d{1,4})m)?(?:(\d{1,5})s)?", re.ASCII)
_CONTAINER = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


def parse_vram(text: str, key: str = VRAM) -> VramAnnotation:
    """Parse ``8Gi``, ``25%`` or ``main=8Gi,cache=2Gi``. ``key`` is the annotation that errors
    name."""
    try:
        return _vram(text, key)
    except BadAnnotation as err:
        raise with_example(err, text, _is_valid) from err


def _is_valid(text: str, key: str) -> bool:
    try:
        if key == VRAM and is_auto(text):
            return bool(_auto(text))
        return bool(_vram(text, key))
    except BadAnnotation:
        return False


def _vram(text: str, key: str) -> VramAnnotation:
    if is_auto(text):
        why = "was not replaced, because Headroom's webhook does this only when a pod is created"
        raise BadAnnotation(key, text, why, "8Gi")
    if "=" not in text:
        return VramAnnotation(everywhere=_amount(text, text, key))
    by_container: dict[str, Bytes | Share] = {}
    for part in text.split(","):
        name, _, amount = (piece.strip() for piece in part.partition("="))
        if not _CONTAINER.fullmatch(name):
            why = f"has no valid container name in {part.strip()!r:.80}"
            raise BadAnnotation(key, text, why, _BY_NAME)
        if name in by_container:
            raise BadAnnotation(key, text, f"names container {name!r} twice", _BY_NAME)
        by_container[name] = _amount(amount, text, key)
    return VramAnnotation(by_container=MappingProxyType(by_container))


_BY_NAME = "main=8Gi,cache=2Gi"
_AUTO = "auto"
_AUTO_EXAMPLE = "auto,min=2Gi,max=20Gi,default=8Gi"


def is_auto(text: str) -> bool:
    """Return whether the text requests the recommendation, with any options."""
    return text.partition(",")[0].strip() == _AUTO


def parse_auto(text: str) -> Auto:
    """Parse a text for which ``is_auto`` is true: ``auto`` or
    ``auto,min=2Gi,max=20Gi,default=8Gi``."""
    try:
        return _auto(text)
    except BadAnnotation as err:
        raise with_example(err, text, _is_valid) from err


def _auto(text: str) -> Auto:
    options: dict[str, Bytes | Share] = {}
    for part in text.split(",")[1:]:
        name, _, amount = (piece.strip() for piece in part.partition("="))
        if name not in ("min", "max", "default"):
            why = f"has an option {part.strip()!r:.80} that is not min=, max= or default="
            raise BadAnnotation(VRAM, text, why, _AUTO_EXAMPLE)
        if name in options:
            raise BadAnnotation(VRAM, text, f"has option {name}= twice", _AUTO_EXAMPLE)
        options[name] = _amount(amount, text, VRAM)
    least, most = options.get("min", Bytes(0)), options.get("max", Bytes(MAX_DEVICE_BYTES))
    if isinstance(least, Share) or isinstance(most, Share):
        raise BadAnnotation(VRAM, text, "has a min= or max= that is not a quantity", _AUTO_EXAMPLE)
    if least.count_bytes > most.count_bytes:
        raise BadAnnotation(VRAM, text, "has min= above max=", _AUTO_EXAMPLE)
    return Auto(least.count_bytes, most.count_bytes, options.get("default"))


def _amount(text: str, whole_text: str, key: str) -> Bytes | Share:
    """Parse one amount. Errors quote ``whole_text``, the value of annotation ``key``."""
    text = text.strip()
    if text.endswith("%"):
        ppm = _ppm(text)
        if ppm is None or ppm == 0:
            raise BadAnnotation(key, whole_text, "is not a share above 0% and up to 100%", "25%")
        return Share(ppm)
    try:
        count_bytes = parse_bytes(text)
    except BadQuantity as err:
        raise BadAnnotation(key, whole_text, f"is not valid: {err.why}", "8Gi") from err
    if count_bytes <= 0:
        raise BadAnnotation(key, whole_text, "is not more than zero bytes", "8Gi")
    if count_bytes > MAX_DEVICE_BYTES:
        raise BadAnnotation(key, whole_text, "is more than any device has", "8Gi")
    return Bytes(count_bytes)


def _ppm(text: str) -> int | None:
    """Parse a percentage into parts per million (``12.5%`` is 125000). Return None if it is invalid
    or above 100."""
    match = _PERCENT.fullmatch(text)
    if match is None:
        return None
    ppm = int(match[1]) * 10_000 + int((match[2] or "").ljust(4, "0"))
    return ppm if ppm <= PPM else None


def render_vram(vram: VramAnnotation) -> str:
    """Return the shortest text that ``parse_vram`` parses to exactly ``vram``."""
    if vram.everywhere is not None:
        return render_amount(vram.everywhere)
    return ",".join(f"{name}={render_amount(a)}" for name, a in vram.by_container.items())


def render_amount(amount: Bytes | Share) -> str:
    """Return ``8Gi``, ``12.5%``, or plain bytes if no binary suffix is exact."""
    if isinstance(amount, Share):
        whole, rest = divmod(amount.ppm, 10_000)
        return f"{whole}.{rest:04d}".rstrip("0").rstrip(".") + "%"
    return format_bytes(amount.count_bytes)


def parse_policy(text: str) -> ScoringPolicy:
    return _parse_choice(ScoringPolicy, POLICY, text, "pack")


def parse_max_sm(text: str) -> int:
    """Parse a limit on SM activity, such as ``70%``, into parts per million (700000)."""
    ppm = _ppm(text.strip())
    if ppm is None or ppm == 0:
        raise BadAnnotation(MAX_SM, text, "is not a share above 0% and up to 100%", "70%")
    return ppm


def parse_processes(text: str) -> int:
    stripped = text.strip()
    if not re.fullmatch(r"[0-9]{1,4}", stripped) or not 1 <= int(stripped) <= MAX_PROCESSES:
        raise BadAnnotation(PROCESSES, text, f"is not a number from 1 to {MAX_PROCESSES}", "2")
    return int(stripped)


def parse_on_overuse(text: str) -> OnOveruse:
    return _parse_choice(OnOveruse, ON_OVERUSE, text, "evict")


def parse_startup(text: str) -> Startup:
    return _parse_choice(Startup, STARTUP, text, "alone")


def parse_startup_timeout(text: str) -> int:
    """Parse a duration, such as ``90s``, ``10m`` or ``1h30m``, into seconds."""
    match = _DURATION.fullmatch(text.strip())
    hours, minutes, seconds = (int(part or 0) for part in (match.groups() if match else ("0",) * 3))
    count_s = 3600 * hours + 60 * minutes + seconds
    if not 1 <= count_s <= MAX_STARTUP_TIMEOUT_S:
        raise BadAnnotation(STARTUP_TIMEOUT, text, "is not a duration from 1s to 24h", "10m")
    return count_s


def parse_device_choice(text: str) -> DeviceChoice:
    if text.strip() in _REMOVED_CHOICES:
        raise BadAnnotation(
            DEVICE_CHOICE, text, "was removed: use predicted or steered", "predicted"
        )
    return _parse_choice(DeviceChoice, DEVICE_CHOICE, text, "predicted")


def parse_gated(text: str) -> bool:
    return _parse_switch(GATED, text)


def parse_maintenance(text: str) -> bool:
    return _parse_switch(MAINTENANCE, text)


def _parse_switch(key: str, text: str) -> bool:
    stripped = text.strip()
    if stripped not in ("true", "false"):
        raise BadAnnotation(key, text, "is not true or false", "true")
    return stripped == "true"


def parse_share(text: str) -> ShareMode:
    return _parse_choice(ShareMode, SHARE, text, "env")


def _parse_choice(choices: type[Choice], key: str, text: str, example: str) -> Choice:
    try:
        return choices(text.strip())
    except ValueError:
        names = ", ".join(choice.value for choice in choices)
        raise BadAnnotation(key, text, f"is not one of {names}", example) from None


def is_extender_annotation(key: str) -> bool:
    """Return whether only extenders write this annotation on pods."""
    return key in EXTENDER_ANNOTATIONS or key.startswith(EXTENDER_ANNOTATION_PREFIXES)


def parse_unified_memory(text: str) -> int:
    """Parse the bytes of host memory that a GPU with unified memory may use, and return 0 for
    ``auto``."""
    stripped = text.strip()
    if stripped == "auto":
        return 0
    try:
        pool_bytes = parse_bytes(stripped)
    except BadQuantity as err:
        why = f"is neither auto nor an amount of memory: {err.why}"
        raise BadAnnotation(UNIFIED_MEMORY, text, why, "96Gi") from err
    if not 1 << 20 <= pool_bytes <= MAX_DEVICE_BYTES:
        why = "is less than 1Mi or more than any device has"
        raise BadAnnotation(UNIFIED_MEMORY, text, why, "96Gi")
    return pool_bytes


def parse_reserve(text: str) -> int:
    """Parse the bytes that are kept free on every device of a node. Zero is allowed."""
    try:
        reserve_bytes = parse_bytes(text.strip())
    except BadQuantity as err:
        raise BadAnnotation(RESERVE, text, f"is not valid: {err.why}", "512Mi") from err
    if reserve_bytes < 0:
        raise BadAnnotation(RESERVE, text, "is negative", "512Mi")
    if reserve_bytes > MAX_DEVICE_BYTES:
        raise BadAnnotation(RESERVE, text, "is more than any device has", "512Mi")
    return reserve_bytes


def parse_cordon(text: str) -> frozenset[str]:
    """Parse the UUIDs of the cordoned devices of a node. An empty text means none."""
    uuids = [part.strip() for part in text.split(",")] if text.strip() else []
    for uuid in uuids:
        if not _DEVICE_UUID.fullmatch(uuid):
            raise BadAnnotation(
                CORDON, text, f"is not valid: {uuid!r} is not the UUID of a GPU", CORDON_EXAMPLE
            )
    if len(uuids) > MAX_CORDONED:
        raise BadAnnotation(
            CORDON, text, f"names {len(uuids)} devices, at most {MAX_CORDONED}", CORDON_EXAMPLE
        )
    return frozenset(uuids)
