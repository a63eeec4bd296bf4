"""Finds the cgroups of pods below the host's /sys/fs/cgroup.

The kubelet creates a pod's cgroup right after it has admitted the pod, before it waits for volumes.
It removes the cgroup after the pod's containers have ended and its volumes are unmounted
(``SyncPod`` and ``SyncTerminatedPod`` in kubelet.go of Kubernetes).
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent.probes.cgroup import pod_of

#: Maximum depth of a pod's cgroup. Example:
#: kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/<pod>
_MOST_LEVELS = 4
#: Controllers of cgroups v1, each of which has a hierarchy with the cgroups of all pods.
_CONTROLLERS = ("pids", "memory", "cpu", "systemd")


def pod_cgroups(root: Path) -> Mapping[str, str]:
    """Return uid -> cgroup directory of every pod; empty if ``root`` has no pod's cgroup.

    With cgroups v1 the directories are those of one controller.
    """
    for hierarchy in (root, *(root / controller for controller in _CONTROLLERS)):
        if found := dict(_pods(str(hierarchy), 0)):
            return found
    return {}


def folders(folder: str) -> list[os.DirEntry[str]]:
    """Return the subdirectories of a directory; none if it was removed meanwhile."""
    try:
        with os.scandir(folder) as entries:
            return [each for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _pods(folder: str, level: int) -> Iterator[tuple[str, str]]:
    """Yield uid and cgroup directory of every pod below the kubelet's top-level cgroups."""
    for each in folders(folder):
        if uid := pod_of(each.name):
            yield uid, each.path
        elif level < _MOST_LEVELS and (level or "kube" in each.name):
            yield from _pods(each.path, level + 1)
