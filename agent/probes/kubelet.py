"""Reads which container holds which replica, from the kubelet's checkpoint and PodResources.

The checkpoint has the uids of pods, PodResources has their names. Entries with equal container,
resource and replicas are of the same pod, because no two running pods hold the same replica. So a
recreated pod of the same name is distinguished from its predecessor by its uid.

The checkpoint is read first, so its entries are older than the list of PodResources. If that list
lacks an entry, then its pod has ended, or the kubelet has just started and has not loaded its pods.
After ``SETTLED_AFTER_S`` the pod counts as ended, until then the checkpoint counts. If PodResources
lists replicas that the checkpoint does not have, the checkpoint is read again.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.probes.checkpoint import BadCheckpoint, Checkpoint, Entry, read_checkpoint
from agent.probes.podresources import ListedContainer, PodResources, Unanswered
from agent.probes.readings import (
    AnswerReading,
    HoldingReading,
    Reading,
    RegisteredReading,
    SourceReading,
)

CHECKPOINT = "checkpoint"
PODRESOURCES = "podresources"

#: Seconds between two computations of the checksum while the file changes with every sample.
VERIFY_EVERY_S = 300.0

#: Seconds after its start in which a kubelet may not have loaded its pods.
SETTLED_AFTER_S = 10.0

_VOLUME_MOUNTS = "/var/run/nvidia-container-devices"

#: Namespace and name of a pod.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of joining checkpoint and PodResources."""

    holdings: list[HoldingReading]
    #: Uids of the pods that have entries in the checkpoint and that PodResources does not list.
    unlisted: frozenset[str] = frozenset()
    #: Uid -> name of the pods that PodResources lists.
    names: Mapping[str, Name] = field(default_factory=dict)
    #: Whether PodResources lists a replica that the checkpoint does not have.
    unwritten: bool = False
    #: Whether an entry matches several pods.
    ambiguous: bool = False


class KubeletProbe:
    """Reads device assignments from the file ``checkpoint`` and the service at ``socket``.

    ``wall_s`` returns the Unix time, which is compared with the time of change of the kubelet's
    socket. ``monotonic_s`` measures how long a pod has been unlisted.
    """

    def __init__(
        self,
        checkpoint: Path,
        socket: Path,
        service: PodResources | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        settled_after_s: float = SETTLED_AFTER_S,
    ) -> None:
        self._checkpoint = _CheckpointFile(checkpoint, monotonic_s)
        self._socket = socket
        self._service = service or PodResources(str(socket))
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._settled_after_s = settled_after_s
        #: Uid -> since when every answer of PodResources has omitted it; -infinity: it has ended.
        self._unlisted_since_s: dict[str, float] = {}
        self._names: dict[str, Name] = {}
        #: Inode and time of change (ns) of the socket, which the kubelet creates at every start.
        self._birth: tuple[int, int] | None = None

    def read(self) -> Iterable[Reading]:
        checkpoint, source = self._checkpoint.read()
        listed, healthy, service = self._ask()
        entries = () if checkpoint is None else checkpoint.entries
        joined = self._join(entries, listed)
        if checkpoint is not None and joined.unwritten:
            checkpoint, source = self._checkpoint.read()
            entries = () if checkpoint is None else checkpoint.entries
            joined = self._join(entries, listed)
        uids = {entry.pod_uid for entry in entries}
        names = {**self._names, **joined.names}
        self._names = {uid: name for uid, name in names.items() if uid in uids}
        return [
            *joined.holdings,
            *_registered(checkpoint, healthy),
            *_answers(entries),
            source,
            _judged(service, listed, joined, self._unlisted_since_s, checkpoint),
        ]

    def _ask(
        self,
    ) -> tuple[list[ListedContainer] | None, dict[str, frozenset[str]] | None, SourceReading]:
        """Return containers and healthy replicas (None: not answered), and the source's state."""
        try:
            found = self._socket.stat()
        except OSError as err:
            self._birth = None
            why = _why(err, "no socket; it is mounted from /var/lib/kubelet/pod-resources")
            return None, None, SourceReading(PODRESOURCES, "absent", why)
        birth = (found.st_ino, found.st_ctime_ns)
        if birth != self._birth:
            self._birth = birth
            self._unlisted_since_s.clear()
            self._service.close()
        try:
            listed = self._service.containers()
        except Unanswered as err:
            return None, None, SourceReading(PODRESOURCES, "degraded", str(err))
        try:
            return listed, self._service.healthy(), SourceReading(PODRESOURCES)
        except Unanswered as err:
            return listed, None, SourceReading(PODRESOURCES, "degraded", str(err))

    def _join(self, entries: Sequence[Entry], listed: Sequence[ListedContainer] | None) -> Joined:
        """Join both sources, without the entries of pods that count as ended."""
        if listed is None:
            # Without an answer no pod counts as unlisted: start again with the next answer.
            self._unlisted_since_s.clear()
            return join(entries, (), self._names)
        now_s = self._monotonic_s()
        first = join(entries, listed, self._names)
        self._unlisted_since_s = {
            uid: self._unlisted_since_s.get(uid, now_s) for uid in first.unlisted
        }
        # A clock that was set back makes the kubelet younger, which is safe.
        born_s = math.inf if self._birth is None else self._birth[1] / 1e9
        settled = bool(listed) and self._wall_s() - born_s >= self._settled_after_s
        ended = {
            uid
            for uid, since_s in self._unlisted_since_s.items()
            if settled or now_s - since_s >= self._settled_after_s
        }
        for uid in ended:
            self._unlisted_since_s[uid] = float("-inf")  # it stays ended
        if not ended:
            return first
        return join(entries, listed, self._names, ended)


class _CheckpointFile:
    """The checkpoint, parsed again only if the file changed.

    The checksum is the most expensive part. So it is computed at the first sample in which the file
    has not changed. If the file changes with every sample, it is computed every ``VERIFY_EVERY_S``.
    After a file that could not be used, the next one is verified at once.
    """

    def __init__(self, path: Path, monotonic_s: Callable[[], float]) -> None:
        self._path = path
        self._monotonic_s = monotonic_s
        self._signature: tuple[int, int, int] | None = None
        self._last: tuple[Checkpoint | None, SourceReading] = (None, SourceReading(CHECKPOINT))
        #: When a checksum was last computed.
        self._verified_s = float("-inf")

    def read(self) -> tuple[Checkpoint | None, SourceReading]:
        """Return the content (None if it cannot be read), and the state of the source."""
        try:
            found = self._path.stat()
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            changed = signature != self._signature
            checkpoint, source = self._last
            if changed or (checkpoint is not None and checkpoint.verified is None):
                late = self._monotonic_s() - self._verified_s >= VERIFY_EVERY_S
                self._last = self._parsed(not changed or late or source.state != "ok")
                self._signature = signature
        except OSError as err:
            self._signature = None
            why = _why(err, "no file; it is mounted from /var/lib/kubelet/device-plugins")
            missing = isinstance(err, FileNotFoundError)
            return None, SourceReading(CHECKPOINT, "absent" if missing else "degraded", why)
        return self._last

    def _parsed(self, verify: bool) -> tuple[Checkpoint | None, SourceReading]:
        try:
            checkpoint = read_checkpoint(self._path, verify=verify)
        except BadCheckpoint as err:
            return None, SourceReading(CHECKPOINT, "degraded", str(err))
        if verify:
            self._verified_s = self._monotonic_s()
        if checkpoint.verified is False:
            why = "its checksum does not match its content"
            return checkpoint, SourceReading(CHECKPOINT, "degraded", why)
        return checkpoint, SourceReading(CHECKPOINT)


def _registered(
    checkpoint: Checkpoint | None, healthy: dict[str, frozenset[str]] | None
) -> Iterable[Reading]:
    """Yield the healthy replicas of each resource.

    They are read from PodResources, which is current, or else from the checkpoint, which is as old
    as its last write.
    """
    if healthy is not None:
        # PodResources omits resources without healthy replicas; the checkpoint has them.
        known = set() if checkpoint is None else set(checkpoint.registered)
        for resource in sorted(known | healthy.keys()):
            replicas = healthy.get(resource, frozenset())
            yield RegisteredReading(PODRESOURCES, resource, replicas)
    elif checkpoint is not None:
        for resource, ids in sorted(checkpoint.registered.items()):
            yield RegisteredReading(CHECKPOINT, resource, frozenset(ids))


def _answers(entries: Iterable[Entry]) -> Iterable[Reading]:
    """Yield how the plugin passed devices to containers, each different way once per resource."""
    found = {
        (entry.resource, _strategies(entry), "CUDA_MPS_PIPE_DIRECTORY" in entry.answer.environment)
        for entry in entries
        if entry.answer is not None
    }
    for resource, strategies, mps in sorted(found, key=str):
        yield AnswerReading(CHECKPOINT, resource, strategies, mps)


def _strategies(entry: Entry) -> frozenset[str]:
    """Return the plugin's device list strategies, as its answer to the kubelet shows them.

    See ``Allocate`` in server.go of NVIDIA's plugin.
    """
    answer = entry.answer
    if answer is None:
        return frozenset()
    visible = answer.environment.get("NVIDIA_VISIBLE_DEVICES", "")
    shown = {
        "volume-mounts": visible == _VOLUME_MOUNTS,
        "envvar": visible not in ("", "void", _VOLUME_MOUNTS),
        "cdi-annotations": any(key.startswith("cdi.k8s.io/") for key in answer.annotations),
        "cdi-cri": bool(answer.cdi_devices),
    }
    return frozenset(strategy for strategy, there in shown.items() if there)


def _judged(
    service: SourceReading,
    listed: Collection[ListedContainer] | None,
    joined: Joined,
    unlisted_since_s: dict[str, float],
    checkpoint: Checkpoint | None,
) -> SourceReading:
    """Return the state of PodResources after the comparison with the checkpoint."""
    if listed is None or service.state != "ok":
        return service
    if any(since_s != float("-inf") for since_s in unlisted_since_s.values()):
        why = "does not list pods that the checkpoint has; they still count as running"
    elif checkpoint is None and joined.unwritten:
        why = "lists pods without their uids, and there is no checkpoint to look them up"
    elif joined.unwritten:
        why = "lists replicas that the checkpoint does not have"
    elif joined.ambiguous:
        why = "several pods match the same entry of the checkpoint"
    else:
        return service
    return SourceReading(PODRESOURCES, "degraded", why)


def _why(err: OSError, missing: str) -> str:
    """Return ``missing`` if there is no file, otherwise the system's text of the error."""
    if isinstance(err, FileNotFoundError):
        return missing
    return os.strerror(err.errno or 0)


def join(
    entries: Sequence[Entry],
    listed: Sequence[ListedContainer],
    known_names: Mapping[str, Name],
    ended: Collection[str] = (),
) -> Joined:
    """Join checkpoint and PodResources.

    ``known_names`` are uid -> name of earlier joins. Entries of the uids ``ended`` are left out,
    unless PodResources lists them. Replicas that only PodResources lists have no uid.
    """
    names, ambiguous = _names(entries, listed)
    all_names = {**known_names, **names}
    unlisted = frozenset(entry.pod_uid for entry in entries) - names.keys()
    holdings = [
        HoldingReading(
            "checkpoint,podresources" if entry.pod_uid in names else "checkpoint",
            entry.pod_uid,
            entry.container,
            entry.resource,
            replica,
            *all_names.get(entry.pod_uid, ("", "")),
        )
        for entry in entries
        if entry.pod_uid not in ended or entry.pod_uid in names
        for replica in entry.replicas
    ]
    written = {(each.container, each.resource, each.replica) for each in holdings}
    unwritten = [
        HoldingReading("podresources", "", c.container, resource, replica, c.namespace, c.pod)
        for c in listed
        for resource, replicas in c.devices.items()
        for replica in sorted(replicas)
        if (c.container, resource, replica) not in written
    ]
    return Joined(holdings + unwritten, unlisted, names, bool(unwritten), ambiguous)


def _names(
    entries: Sequence[Entry], listed: Sequence[ListedContainer]
) -> tuple[dict[str, Name], bool]:
    """Return uid -> name of the unique matches, and whether any match was ambiguous."""
    holders: dict[tuple[str, str, frozenset[str]], set[Name]] = {}
    for container in listed:
        for resource, replicas in container.devices.items():
            key = (container.container, resource, replicas)
            holders.setdefault(key, set()).add((container.namespace, container.pod))
    candidates: dict[str, set[Name]] = {}
    for entry in entries:
        key = (entry.container, entry.resource, frozenset(entry.replicas))
        candidates.setdefault(entry.pod_uid, set()).update(holders.get(key, ()))
    claimed: dict[Name, list[str]] = {}
    for uid, found in candidates.items():
        for name in found:
            claimed.setdefault(name, []).append(uid)
    names = {
        uid: name
        for uid, found in candidates.items()
        if len(found) == 1
        for name in found
        if len(claimed[name]) == 1
    }
    return names, any(candidates[uid] and uid not in names for uid in candidates)
