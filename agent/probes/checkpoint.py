"""Reads the checkpoint of the kubelet's device manager.

The device manager writes the file at every allocation before the container starts, and whenever a
plugin reports a change of its devices. No other source has both pod uids and replica ids. Pods that
have ended stay in the file until the next allocation, and an ordinary init container keeps its
entry as long as its pod exists. ``RegisteredDevices`` contains only healthy replicas.
"""

import base64
import binascii
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from agent.probes import protobuf

_MOST_BYTES = 64 << 20
#: Interval in seconds at which the file is checked for changes.
CHECK_EVERY_S = 0.2


class BadCheckpoint(Exception):
    """The file is not a kubelet's checkpoint."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The replicas of one resource that the kubelet has allocated to one container."""

    pod_uid: str
    container: str
    resource: str
    replicas: tuple[str, ...]
    #: The plugin's response to ``Allocate``, or None if it cannot be read.
    answer: "Answer | None" = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of the plugin's response to ``Allocate`` that shows how the plugin is configured."""

    environment: Mapping[str, str]
    annotations: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of the file."""

    entries: tuple[Entry, ...]
    #: Healthy replicas of each resource.
    registered: Mapping[str, tuple[str, ...]]
    #: Number of unreadable entries and resources.
    left_out: int = 0


# Maximum lengths in the report. Replica ids of other device plugins and uids of static pods can be
# longer.
_MOST_UID_CHARS = 128
_MOST_CONTAINER_CHARS = 63
MOST_REPLICA_CHARS = 256


class _Entry(msgspec.Struct):
    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    #: Replicas by NUMA node. Kubelets before 1.20 wrote a plain list of replicas.
    replicas: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")
    answer: str | None = msgspec.field(name="AllocResp", default=None)


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[msgspec.Raw] | None
    registered_devices: dict[str, msgspec.Raw] | None


class _File(msgspec.Struct, rename="pascal"):
    data: _Data


_decoder = msgspec.json.Decoder(_File)
_entry_decoder = msgspec.json.Decoder(_Entry)
_devices_decoder = msgspec.json.Decoder(list[str] | None)
_NOT_READ = (msgspec.MsgspecError, ValueError, RecursionError)


@contextmanager
def watched(path: Path, changed: Callable[[], object]) -> Iterator[None]:
    """Call ``changed`` in another thread whenever the file has changed, until the context ends.

    The file is checked every ``CHECK_EVERY_S`` seconds. Several changes between two checks cause
    only one call.
    """
    end = threading.Event()

    def watch(last: tuple[int, int, int] | None) -> None:
        while not end.wait(CHECK_EVERY_S):
            if (now := signature(path)) != last:
                last = now
                changed()

    thread = threading.Thread(target=watch, args=(signature(path),), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def signature(path: Path) -> tuple[int, int, int] | None:
    """Return inode, modification time in ns and size of the file, to detect changes.

    Return None if the file cannot be read.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the file. Raises ``BadCheckpoint`` and ``OSError``."""
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES)
    return parse_checkpoint(content)


def parse_checkpoint(content: bytes) -> Checkpoint:
    """Parse the content of a checkpoint. Raises ``BadCheckpoint``.

    Entries and resources that cannot be read are skipped and counted.
    """
    try:
        file = _decoder.decode(content)
    except _NOT_READ as err:
        # The message must not contain the content of the file, which changes with every write.
        raise BadCheckpoint(f"not a device manager's checkpoint ({type(err).__name__})") from err
    good: list[_Entry] = []
    registered: dict[str, list[str] | None] = {}
    left_out = 0
    for raw in file.data.pod_device_entries or ():
        try:
            good.append(_entry_decoder.decode(raw))
        except _NOT_READ:
            left_out += 1
    for name, raw in (file.data.registered_devices or {}).items():
        try:
            registered[name] = _devices_decoder.decode(raw)
        except _NOT_READ:
            left_out += 1
    return Checkpoint(
        tuple(_entry(entry) for entry in good),
        {name: tuple(sorted(ids or ())) for name, ids in registered.items()},
        left_out,
    )


def _entry(entry: _Entry) -> Entry:
    """Convert an entry for the agent.

    Replicas with ids that are too long for the report are skipped, because no device of NVIDIA's
    plugin has such an id. The uid and the name of the container are truncated.
    """
    by_numa = entry.replicas if isinstance(entry.replicas, dict) else {}
    flat = entry.replicas if isinstance(entry.replicas, list) else []
    replicas = {each for some in by_numa.values() for each in some or ()} | set(flat)
    given = tuple(sorted(each for each in replicas if len(each) <= MOST_REPLICA_CHARS))
    uid, container = entry.pod_uid[:_MOST_UID_CHARS], entry.container[:_MOST_CONTAINER_CHARS]
    return Entry(uid, container, entry.resource, given, _answer(entry.answer))


@lru_cache(maxsize=256)
def _answer(encoded: str | None) -> Answer | None:
    """Decode a ``ContainerAllocateResponse`` of the device plugin API (v1beta1)."""
    if encoded is None:
        return None
    try:
        fields = list(protobuf.fields(base64.b64decode(encoded)))
        environment = dict(_pair(value) for number, value in fields if number == 1)
        annotations = [_pair(value)[0] for number, value in fields if number == 4]
        cdi_devices = [_pair(value)[0] for number, value in fields if number == 5]
    except (protobuf.BadMessage, binascii.Error):
        return None
    return Answer(environment, tuple(annotations), tuple(cdi_devices))


def _pair(value: bytes | int) -> tuple[str, str]:
    """Decode an entry of a map, or the first two fields of a message with texts."""
    texts = dict(protobuf.fields(protobuf.message(value)))
    return protobuf.text(texts.get(1, b"")), protobuf.text(texts.get(2, b""))
