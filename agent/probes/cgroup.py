"""Finds the pod and the container of a process in the text of its cgroup file. Pure.

    0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-…
    0::/kubepods/burstable/pod<uid>/<64 hex>

The first line comes from the kubelet's systemd driver, which replaces the dashes of the uid by
underscores, and the second from its cgroupfs driver. There are these variants:

* The path of a guaranteed pod has no level for the quality of service.
* Cgroups v1 repeat the path for each controller.
* Docker, kind and nested clusters add a prefix. In a cgroup namespace the prefix is ``/../..``.
* CRI-O may add a level below the container.
* If runtime and kubelet use different drivers, one level names both pod and container:
  ``kubepods-pod<uid>.slice:cri-containerd:<64 hex>``.
* The uid of a static pod is a hash of 32 hex digits without dashes.

A container with a writable cgroup can create levels of any name below its own level, such as the
name of another pod. So only the outermost pod counts, after the pods that the node itself runs in.
"""

import re
from functools import lru_cache

_UID = r"(?:[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_POD = re.compile(rf"(?:.+-)?pod(?P<uid>{_UID})(?:\.slice)?")
_CONTAINER = re.compile(r"(?:[a-z][a-z0-9-]*-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_HASH = re.compile(r"[0-9a-f]{32}")


@lru_cache(maxsize=1024)
def owner(text: str, around: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the pod uid and the container id of a process. Both are empty if the process is in no
    pod.

    The id is also empty if no level below the pod belongs to a container. ``text`` is the content
    of the process's cgroup file. With cgroups v1, it has a line for each controller, and the paths
    can differ. So the line whose path contains the most pods is used. ``around`` contains the pods
    that the node runs in, as ``pods`` returns them. Results are cached, because all processes of a
    container have the same text.
    """
    found = _longest(text)
    if tuple(uid for uid, _ in found[: len(around)]) == around:
        found = found[len(around) :]
    return found[0] if found else ("", "")


def pods(text: str) -> tuple[str, ...]:
    """Return the uids of the pods that contain a process, outermost first."""
    return tuple(uid for uid, _ in _longest(text))


def _longest(text: str) -> tuple[tuple[str, str], ...]:
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
    return max(map(_owners, paths), key=len, default=())


def _owners(path: str) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for part in re.split("[/:]", path):
        if pod := pod_of(part):
            found.append((pod, ""))
        elif found and not found[-1][1] and (container := container_of(part)):
            found[-1] = found[-1][0], container
    return tuple(found)


def pod_of(part: str) -> str:
    """Return the pod uid in the name of a path level, or an empty string if the level belongs to no
    pod."""
    match = _POD.fullmatch(part)
    return match["uid"].replace("_", "-") if match else ""


def container_of(part: str) -> str:
    """Return the container id in the name of a path level, or an empty string if the level belongs
    to no container."""
    match = _CONTAINER.fullmatch(part)
    return match["id"] if match else ""


def is_static(uid: str) -> bool:
    """Return whether a uid belongs to a static pod. Such a uid is a hash of the pod's manifest."""
    return _HASH.fullmatch(uid) is not None
