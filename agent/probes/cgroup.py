"""Decides to which pod and container a process belongs, from the text of its cgroup file. Pure.

    0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-…
    0::/kubepods/burstable/pod<uid>/<64 hex>

The first is the kubelet's systemd driver (dashes of the uid become underscores), the second its
cgroupfs driver. A guaranteed pod has no level for its quality of service; version 1 repeats the
path for each controller; Docker, kind and pods in pods put something before it; a reader in a
cgroup namespace of its own sees ``/../..`` in its place; CRI-O may add a level below. Where runtime
and kubelet have different drivers, one level names pod and container, with colons between them:
``kubepods-pod<uid>.slice:cri-containerd:<64 hex>``. The uid of a static pod is a hash, 32 hex
digits without dashes.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

_UID = r"(?:[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_POD = re.compile(rf"(?:.+-)?pod(?P<uid>{_UID})(?:\.slice)?")
_CONTAINER = re.compile(r"(?:[a-z][a-z0-9-]*-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Owner:
    #: Uids, outermost first; none: a process of the machine itself.
    pods: tuple[str, ...]
    #: The container within the innermost pod; empty where the path does not say.
    container_id: str


NOBODY = Owner((), "")


@lru_cache(maxsize=1024)
def owner(text: str) -> Owner:
    """Return the owner of a process; the most detailed line counts.

    The processes of one container have the same text, and get the same answer.
    """
    found = [_of_path(line.split(":", 2)[2]) for line in text.splitlines() if line.count(":") >= 2]
    return max(found, key=lambda each: (len(each.pods), bool(each.container_id)), default=NOBODY)


def pod_of(part: str) -> str:
    """The uid in the name of a pod's level; empty where it is none's."""
    match = _POD.fullmatch(part)
    return match["uid"].replace("_", "-") if match else ""


def container_of(part: str) -> str:
    """The id in the name of a container's level; empty where it is none's."""
    match = _CONTAINER.fullmatch(part)
    return match["id"] if match else ""


def is_static(uid: str) -> bool:
    """Whether a pod's uid is the hash of a static one's manifest."""
    return _HASH.fullmatch(uid) is not None


def _of_path(path: str) -> Owner:
    pods: list[str] = []
    container_id = ""
    for part in re.split("[/:]", path):
        if uid := pod_of(part):
            pods.append(uid)
            container_id = ""
        elif pods:
            container_id = container_of(part) or container_id
    return Owner(tuple(pods), container_id)
