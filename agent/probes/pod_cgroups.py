"""Finds the cgroups of pods below the host's /sys/fs/cgroup.

The kubelet creates a pod's cgroup immediately after it has admitted the pod, before it waits for
volumes. It removes the cgroup after the pod's containers have ended and its volumes are unmounted
(``SyncPod`` and ``SyncTerminatedPod`` in kubelet.go of Kubernetes).
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from agent.probes.cgroup import pod_of

#: Maximum depth of a pod's cgroup. Example:
#: kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/<pod>
_MOST_LEVELS = 4
#: Controllers of cgroups v1. The hierarchy of each of them contains the cgroups of all pods.
_CONTROLLERS = ("pids", "memory", "cpu", "systemd")


def pod_cgroups(root: Path) -> Mapping[str, str]:
    """Return the cgroup directory of every pod by uid. Empty if ``root`` contains no pod's cgroup.

    With cgroups v1 the directories belong to one controller.
    """
    for hierarchy in (root, *(root / controller for controller in _CONTROLLERS)):
        if found := dict(_pods(str(hierarchy), 0)):
            return found
    return {}


class LostCgroups:
    """Finds pods that have lost their cgroup. ``root`` is the host's /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self._root = root
        #: The cgroup directory that each pod had when it was last seen, by uid.
        self._seen: dict[str, str] = {}

    def among(self, uids: Collection[str]) -> set[str]:
        """Return the pods in ``uids`` that had a cgroup at an earlier call and have none now.

        Other pods are forgotten.
        """
        seen = {uid: folder for uid, folder in self._seen.items() if uid in uids}
        lost = {uid for uid, folder in seen.items() if not os.path.isdir(folder)}
        if lost or len(seen) < len(uids):
            found = pod_cgroups(self._root)
            seen.update((uid, found[uid]) for uid in found.keys() & set(uids))
            lost -= found.keys()
        self._seen = seen
        return lost


def folders(folder: str) -> list[os.DirEntry[str]]:
    """Return the subdirectories of a directory, or none if the directory no longer exists."""
    try:
        with os.scandir(folder) as entries:
            return [each for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _pods(folder: str, level: int) -> Iterator[tuple[str, str]]:
    """Yield the uid and the cgroup directory of every pod below the kubelet's top-level cgroups."""
    for each in folders(folder):
        if uid := pod_of(each.name):
            yield uid, each.path
        elif level < _MOST_LEVELS and (level or "kube" in each.name):
            yield from _pods(each.path, level + 1)
