"""Reads which container holds which replica, from the kubelet's checkpoint and PodResources.

The checkpoint contains the uids of pods, and PodResources their names. Entries with the same
container, resource and replicas belong to the same pod, because no two running pods hold the same
replica. So the uid distinguishes a recreated pod from the earlier pod with the same name.

The checkpoint is read first, so its entries are older than the list of PodResources. If the list
lacks an entry that it had before, then the pod has ended, or the kubelet has just started and has
not loaded its pods yet. So the entry in the checkpoint stays valid for ``SETTLED_AFTER_S`` seconds.
After that, the pod counts as ended. If PodResources lists replicas that the checkpoint does not
contain, the checkpoint is read again.

PodResources never lists ordinary init containers. So it never lists a pod that requests devices
only in init containers, although the kubelet keeps the devices until the pod ends. Such a pod
counts as running while it has a cgroup. The kubelet creates the cgroup a moment after it has
written the checkpoint, so the pod also counts as running for ``SETTLED_AFTER_S`` seconds without a
cgroup.

Kubelet 1.31 keeps listing the pod that it admitted last, even if the pod has ended, until it admits
another pod (``pendingAdmissionPod`` in manager.go of its device manager). So a listed pod whose
cgroup is gone counts as ended.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.probes.cause import Cause
from agent.probes.checkpoint import Checkpoint, Entry
from agent.probes.checkpoint_file import CHECKPOINT, CheckpointFile, why_not_read
from agent.probes.pod_cgroups import LostCgroups, pod_cgroups
from agent.probes.podresources import ListedContainer, PodResources, Unanswered
from agent.probes.readings import (
    AnswerReading,
    HoldingReading,
    Reading,
    RegisteredReading,
    SourceReading,
)

PODRESOURCES = "podresources"

#: A kubelet may take this number of seconds after its start to load its pods.
SETTLED_AFTER_S = 10.0

_VOLUME_MOUNTS = "/var/run/nvidia-container-devices"

#: Namespace and name of a pod.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Joined:
    """The combined content of checkpoint and PodResources."""

    holdings: list[HoldingReading]
    #: Uids of the pods with entries in the checkpoint that PodResources does not list.
    unlisted: frozenset[str] = frozenset()
    #: Names of the pods that PodResources lists, by uid.
    names: Mapping[str, Name] = field(default_factory=dict)
    #: Whether PodResources lists a replica that the checkpoint does not contain.
    unwritten: bool = False
    #: Whether an entry matches several pods.
    ambiguous: bool = False


class KubeletProbe:
    """Reads device assignments from the file ``checkpoint`` and the service at ``socket``.

    ``cgroups`` is the host's /sys/fs/cgroup. If it is None, pods that are not listed count as
    ended. ``wall_s`` returns the Unix time, which is compared with the change time of the kubelet's
    socket. ``monotonic_s`` measures how long a pod has not been listed.
    """

    def __init__(
        self,
        checkpoint: Path,
        socket: Path,
        service: PodResources | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        settled_after_s: float = SETTLED_AFTER_S,
        cgroups: Path | None = None,
    ) -> None:
        self._checkpoint = CheckpointFile(checkpoint)
        self._socket = socket
        self._service = service or PodResources(str(socket))
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._settled_after_s = settled_after_s
        self._cgroups = cgroups
        self._lost_cgroups = None if cgroups is None else LostCgroups(cgroups)
        #: Since when every response of PodResources has omitted a pod, by the pod's uid. The time
        #: is -infinity if the pod has ended.
        self._unlisted_since_s: dict[str, float] = {}
        #: Names of the pods in the checkpoint that PodResources lists or has listed, by uid.
        self._names: dict[str, Name] = {}
        #: Uids of the pods in the checkpoint that were never listed but had a cgroup.
        self._had_cgroup: set[str] = set()
        #: Why pods that were never listed cannot be checked. Empty if there are no such pods, or if
        #: they can be checked.
        self._no_cgroups = ""
        #: Inode and change time (ns) of the socket, which the kubelet creates at every start.
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
        self._had_cgroup &= uids
        return [
            *joined.holdings,
            *_registered(checkpoint, healthy),
            *_answers(entries),
            source,
            _judged(service, listed, joined, self._unlisted_since_s, checkpoint, self._no_cgroups),
        ]

    def _ask(
        self,
    ) -> tuple[list[ListedContainer] | None, dict[str, frozenset[str]] | None, SourceReading]:
        """Return containers and healthy replicas (None if the kubelet did not answer), and the
        state of the source."""
        try:
            found = self._socket.stat()
        except OSError as err:
            self._birth = None
            why = why_not_read(err, "no socket; it is mounted from /var/lib/kubelet/pod-resources")
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
            healthy = self._service.healthy()
        except Unanswered as err:
            return listed, None, SourceReading(PODRESOURCES, "degraded", str(err))
        if left_out := self._service.left_out:
            why = f"skipped parts of its answers that cannot be read: {left_out}"
            return listed, healthy, SourceReading(PODRESOURCES, "degraded", why)
        return listed, healthy, SourceReading(PODRESOURCES)

    def _join(self, entries: Sequence[Entry], listed: Sequence[ListedContainer] | None) -> Joined:
        """Join both sources, without the entries of pods that count as ended."""
        first = join(entries, listed or (), self._names)
        ended = self._lost({**self._names, **first.names}.keys())
        if listed is None:
            # Without a response, no pod counts as unlisted. The times start again with the next
            # response.
            self._unlisted_since_s.clear()
        else:
            ended |= self._ended(first.unlisted, is_complete=bool(listed))
        return join(entries, listed or (), self._names, ended) if ended else first

    def _lost(self, uids: Collection[str]) -> set[str]:
        """Return the pods that are or were listed and have lost their cgroup.

        These pods have ended, so they never get their released replicas back.
        """
        return set() if self._lost_cgroups is None else self._lost_cgroups.among(uids)

    def _ended(self, unlisted: frozenset[str], is_complete: bool) -> set[str]:
        """Return the unlisted pods that count as ended.

        ``is_complete`` is False if PodResources lists no pods at all, as after a start of the
        kubelet.
        """
        now_s = self._monotonic_s()
        running = self._running(unlisted - self._names.keys())
        self._unlisted_since_s = {
            uid: self._unlisted_since_s.get(uid, now_s) for uid in unlisted - running
        }
        # If the clock was set back, the kubelet only seems to have started later, which is safe.
        born_s = math.inf if self._birth is None else self._birth[1] / 1e9
        is_settled = is_complete and self._wall_s() - born_s >= self._settled_after_s
        ended = {
            uid
            for uid, since_s in self._unlisted_since_s.items()
            if now_s - since_s >= self._settled_after_s or (is_settled and not self._is_new(uid))
        }
        for uid in ended:
            self._unlisted_since_s[uid] = float("-inf")  # the pod stays ended
        return ended

    def _running(self, unlisted: Collection[str]) -> set[str]:
        """Return the pods in ``unlisted`` that have a cgroup. PodResources never listed them."""
        self._no_cgroups = ""
        if not unlisted or self._cgroups is None:
            return set()
        pods = pod_cgroups(self._cgroups)
        if not pods:  # Not even the agent's own pod has a cgroup there.
            self._no_cgroups = (
                f"no pod's cgroup is in {self._cgroups}: mount the host's /sys/fs/cgroup there. "
                "Until then pods that request GPUs only in init containers count as ended"
            )
        running = pods.keys() & set(unlisted)
        self._had_cgroup |= running
        return running

    def _is_new(self, uid: str) -> bool:
        """Return whether the kubelet may have admitted this unlisted pod only a moment ago."""
        return (
            self._cgroups is not None
            and not self._no_cgroups
            and uid not in self._names
            and uid not in self._had_cgroup
        )


def _registered(
    checkpoint: Checkpoint | None, healthy: dict[str, frozenset[str]] | None
) -> Iterable[Reading]:
    """Yield the healthy replicas of each resource.

    They come from PodResources, which is current. If it did not answer, they come from the
    checkpoint, which is as old as its last write.
    """
    if healthy is not None:
        # PodResources omits resources without healthy replicas, but the checkpoint contains them.
        known = set() if checkpoint is None else set(checkpoint.registered)
        for resource in sorted(known | healthy.keys()):
            replicas = healthy.get(resource, frozenset())
            yield RegisteredReading(PODRESOURCES, resource, replicas)
    elif checkpoint is not None:
        for resource, ids in sorted(checkpoint.registered.items()):
            yield RegisteredReading(CHECKPOINT, resource, frozenset(ids))


def _answers(entries: Iterable[Entry]) -> Iterable[Reading]:
    """Yield how the plugin passed devices to containers. Equal values of a resource are yielded
    only once."""
    found = {
        (entry.resource, _strategies(entry), "CUDA_MPS_PIPE_DIRECTORY" in entry.answer.environment)
        for entry in entries
        if entry.answer is not None
    }
    for resource, strategies, mps in sorted(found, key=str):
        yield AnswerReading(CHECKPOINT, resource, strategies, mps)


def _strategies(entry: Entry) -> frozenset[str]:
    """Return the plugin's device list strategies, derived from its response to the kubelet.

    The rules follow ``Allocate`` in server.go of NVIDIA's plugin.
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
    no_cgroups: str,
) -> SourceReading:
    """Return the state of PodResources after its comparison with the checkpoint."""
    if listed is None or service.state != "ok":
        return service
    if any(since_s != float("-inf") for since_s in unlisted_since_s.values()):
        why = "does not list pods that the checkpoint contains; they still count as running"
    elif checkpoint is None and joined.unwritten:
        why = Cause(
            "lists pods without their uids, and there is no checkpoint to look them up",
            "no_checkpoint",
        )
    elif joined.unwritten:
        why = "lists replicas that the checkpoint does not contain"
    elif joined.ambiguous:
        why = "several pods match the same entry of the checkpoint"
    elif no_cgroups:
        why = no_cgroups
    else:
        return service
    return SourceReading(PODRESOURCES, "degraded", why)


def join(
    entries: Sequence[Entry],
    listed: Sequence[ListedContainer],
    known_names: Mapping[str, Name],
    ended: Collection[str] = (),
) -> Joined:
    """Join checkpoint and PodResources.

    ``known_names`` contains the names that earlier joins found, by uid. Entries of the uids in
    ``ended`` are skipped. Replicas that only PodResources lists have no uid.
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
        if entry.pod_uid not in ended
        for replica in entry.replicas
    ]
    written = {
        (entry.container, entry.resource, replica)
        for entry in entries
        if entry.pod_uid not in ended or entry.pod_uid in names
        for replica in entry.replicas
    }
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
    """Return the names of unique matches by uid, and whether any match was ambiguous."""
    holders: dict[tuple[str, str, frozenset[str]], set[Name]] = {}
    for container in listed:
        for resource, replicas in container.devices.items():
            key = (container.container, resource, replicas)
            holders.setdefault(key, set()).add((container.namespace, container.pod))
    candidates: dict[str, set[Name]] = {}
    for entry in entries:
        key = (entry.container, entry.resource, frozenset(entry.replicas))
        found = candidates.setdefault(entry.pod_uid, set())
        if entry.replicas:
            found.update(holders.get(key, ()))
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
