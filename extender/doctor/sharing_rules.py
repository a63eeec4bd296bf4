"""What in a device plugin's way of sharing costs safety or memory: a rule for each setting.

The figures in the advice are those of docs/device-truth.md ("What safety costs").
"""

from collections.abc import Callable, Iterator

from contract.annotations import DEFAULT_VRAM, DEVICE_CHOICE, VRAM, DeviceChoice
from contract.quantity import format_bytes
from extender.doctor.findings import Said, Weight
from extender.doctor.node_facts import Look

#: Replicas of what fits from which on they are enough.
TOO_FEW_RATIO = 0.75
#: Of the memory that replicas as large as the largest request would use, if all were typical.
ALIKE_RATIO = 0.8
#: The plugin refuses to share a device between fewer.
FEWEST_REPLICAS = 2


def _packed(look: Look) -> Iterator[Said]:
    if any(terms.policy == "packed" for terms in look.sliced):
        yield (
            Weight.ADVICE,
            "its device plugin packs (policy packed): the fullest device comes next, so a pod fits "
            "only while that one has room; with pods of 4-60 GiB and 10 replicas an eighth of the "
            "memory was used, and four fifths with policy distributed",
            "set sharedDevicesAllocationPolicy: distributed in the plugin's configuration",
        )


def _unknown_policy(look: Look) -> Iterator[Said]:
    if look.status is not None and any(terms.policy == "unknown" for terms in look.sliced):
        yield (
            Weight.ADVICE,
            "how its device plugin chooses is not known: a pod must fit on every device with a "
            "free replica",
            "let the agent read the plugin's configuration; what it lacks is said by: "
            "kubectl get gpunode NAME -o yaml, under status.sources",
        )


def _aligned(look: Look) -> Iterator[Said]:
    if look.status is None or len({terms.device.numa_node for terms in look.sliced}) < 2:
        return
    policy = look.status.plugin.topology_manager_policy
    if policy == "":
        yield (
            Weight.ADVICE,
            "its topology manager's policy is not known, and its GPUs hang on several NUMA nodes: "
            "a pod must fit on the next device of each of them",
            "set hostPID: true in the agent's DaemonSet: it reads it from the kubelet's process",
        )
    elif policy != "none":
        yield (
            Weight.ADVICE,
            f"its topology manager's policy is {policy}, and its GPUs hang on several NUMA nodes: "
            "a pod must fit on the next device of each of them",
            "set topologyManagerPolicy: none in the kubelet's configuration where pods of one GPU "
            "do not need alignment",
        )


def _any(look: Look) -> Iterator[Said]:
    if look.shared and look.annotations.get(DEVICE_CHOICE) == DeviceChoice.ANY.value:
        yield (
            Weight.ADVICE,
            f"it is annotated {DEVICE_CHOICE}: any, so a pod must fit on all of its devices; with "
            "pods of 4-60 GiB two fifths of the memory were used, and four fifths with predicted",
            "take the annotation away",
        )


def _several(look: Look) -> Iterator[Said]:
    """Where not said, time-slicing lets such a container in and MPS refuses it."""
    if look.status is None or not look.sliced:
        return
    if look.status.plugin.fail_requests_greater_than_one is not True:
        yield (
            Weight.ADVICE,
            "a container may ask for several replicas there, which can all be of one device: it is "
            "charged on every device that it could get, and gets no larger share of any",
            "set failRequestsGreaterThanOne: true under sharing.timeSlicing in the plugin's "
            "configuration",
        )


def _replicas(look: Look) -> Iterator[Said]:
    """Too many cost no memory under ``distributed``: levels are seldom filled up to them. Under
    ``packed`` a full device stays next in line until all its replicas are taken."""
    for resource, replicas, allocatable_bytes, policy in {
        (t.device.resource, t.device.replicas.total, t.allocatable_bytes, t.policy)
        for t in look.sliced
    }:
        typical = look.typical.get(resource)
        if typical is None:
            continue
        each = f"each {resource} device of {rounded(allocatable_bytes)} has {replicas} replicas, "
        asked = f"of {typical.pods} pods half ask for {rounded(typical.median)} or more"
        fit = max(FEWEST_REPLICAS, allocatable_bytes // max(1, typical.median))
        slots = allocatable_bytes // max(1, typical.largest)
        alike = slots * typical.median >= ALIKE_RATIO * allocatable_bytes
        if replicas < TOO_FEW_RATIO * fit:
            yield (
                Weight.ADVICE,
                f"{each}and {asked}: replicas run out before memory does",
                _set_replicas(fit),
            )
        elif policy == "packed" and replicas > fit:
            yield (
                Weight.ADVICE,
                f"{each}and {asked}: a full device stays next in line while it has free replicas",
                _set_replicas(fit),
            )
        elif alike and FEWEST_REPLICAS <= slots < replicas:
            yield (
                Weight.ADVICE,
                f"{each}and {asked}, none for more than {rounded(typical.largest)}",
                f"{_set_replicas(slots)}: then nobody asks for more than a replica is worth, and "
                "nothing that the plugin does can overcommit",
            )


def _set_replicas(count: int) -> str:
    return f"set replicas: {count} in the plugin's configuration"


def _unannotated(look: Look) -> Iterator[Said]:
    for resource, replicas, allocatable_bytes in {
        (t.device.resource, t.device.replicas.total, t.allocatable_bytes) for t in look.sliced
    }:
        typical, silent = look.typical.get(resource), look.silent.get(resource, 0)
        worth_bytes = allocatable_bytes // max(1, replicas)
        if silent and typical is not None and worth_bytes * 2 <= typical.median:
            yield (
                Weight.WARNING,
                f"{silent} pods that ask for {resource} do not say how much memory and are charged "
                f"what a replica is worth, {rounded(worth_bytes)}; half of those that say it ask "
                f"for {rounded(typical.median)} or more",
                f"annotate them ({VRAM}: {rounded(typical.median)}) or their namespace "
                f"({DEFAULT_VRAM}), or set reject_unannotated",
            )


def _mps_limit(look: Look) -> Iterator[Said]:
    for resource, memory_bytes, replicas in {
        (t.device.resource, t.device.memory_bytes, t.device.replicas.total)
        for t in look.shared
        if t.device.sharing == "mps"
    }:
        typical = look.typical.get(resource)
        cap_bytes = memory_bytes // max(1, replicas)
        if typical is not None and typical.largest > cap_bytes:
            yield (
                Weight.WARNING,
                f"MPS gives each process of {resource} {rounded(cap_bytes)} ({replicas} replicas), "
                f"and pods ask for up to {rounded(typical.largest)}: those never fit",
                f"set replicas: {max(FEWEST_REPLICAS, memory_bytes // typical.largest)} or fewer, "
                "or ask for less",
            )


SHARING_RULES: tuple[Callable[[Look], Iterator[Said]], ...] = (
    _packed,
    _unknown_policy,
    _aligned,
    _any,
    _several,
    _replicas,
    _unannotated,
    _mps_limit,
)


def rounded(count_bytes: int) -> str:
    """For people: one decimal of the largest unit; what is exact is said exactly."""
    if len(exact := format_bytes(count_bytes)) <= 5:
        return exact
    for unit, shift in (("Gi", 30), ("Mi", 20)):
        if count_bytes >> shift:
            return f"{count_bytes * 10 // (1 << shift) / 10:.1f}{unit}"
    return exact
