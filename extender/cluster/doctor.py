"""What costs a cluster safety or memory, and what to do about it, from what is known of it now.

Each rule looks at one node and says what it found there and what helps.

The figures in the advice are those of docs/device-truth.md ("What safety costs").
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low

from contract.annotations import (
    DEFAULT_VRAM,
    DEVICE_CHOICE,
    RESERVE,
    VRAM,
    Bytes,
    DeviceChoice,
)
from contract.gpunode import GPUNodeStatus
from contract.quantity import format_bytes
from contract.reasons import Reason
from extender.cluster.findings import Finding, Said, Weight, together, warnings_first
from extender.cluster.freshness import age
from extender.cluster.lacks import CLOCKS_AGREE_S, ahead, differing, lacking
from extender.cluster.state import ClusterState
from extender.placement.equation import DeviceTerms
from extender.placement.request import VramRequest
from extender.placement.snapshot import NodeTerms

#: Pods of a resource from which on what they ask for says what is typical.
ENOUGH_PODS = 5
#: Replicas of what fits from which on they are enough.
TOO_FEW_RATIO = 0.75
#: Of the memory that replicas as large as the largest request would use, if all were typical.
ALIKE_RATIO = 0.8
#: The plugin refuses to share a device between fewer.
FEWEST_REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Typical:
    """What the pods that ask for one resource want on each device, as far as they say."""

    pods: int
    median: int
    largest: int


@dataclass(frozen=True, slots=True)
class _Look:
    """One node and what a rule may know."""

    node: NodeTerms
    annotations: Mapping[str, str]
    #: None where nothing is known of its devices.
    status: GPUNodeStatus | None
    stale: bool
    #: Its newest sign of life, before the look by so many seconds of the wall clock; None: none.
    age_s: float | None
    #: Of the doctor; empty where not known.
    version: str
    #: Resource -> what its pods ask for, and how many do not say it.
    typical: Mapping[str, Typical]
    silent: Mapping[str, int]

    @property
    def shared(self) -> list[DeviceTerms]:
        return [terms for terms in self.node.devices if terms.shared and terms.fence is None]

    @property
    def sliced(self) -> list[DeviceTerms]:
        return [terms for terms in self.shared if terms.device.sharing == "time-slicing"]


def examine(state: ClusterState, now_s: float, version: str = "") -> list[Finding]:
    """All that is to be said, warnings first; ``now_s`` is the receiver's monotonic clock, and
    ``version`` is that of this package, with which the agents' are compared."""
    asks = _asks(state)
    typical, silent = typical_requests(asks), Counter(a.resource for a in asks if not a.said)
    said: dict[Said, list[str]] = {}
    for terms in sorted(state.snapshot().nodes, key=lambda node: node.name):
        node = state.node(terms.name)
        offers = node.status.allocatable if node and node.status else None
        if node is None or not any(state.rules.manages(name) for name in offers or ()):
            continue  # a GPUNode without its Node, or a node without GPUs of ours
        look = _Look(
            terms,
            node.metadata.annotations or {},
            state.report(terms.name, state.gpunode(terms.name)),
            terms.fresh_until_s < now_s,
            _age_s(state, terms.name, now_s),
            version,
            typical,
            silent,
        )
        for rule in _RULES:
            for one in rule(look):
                said.setdefault(one, []).append(terms.name)
    return warnings_first(together(said))


def _age_s(state: ClusterState, name: str, now_s: float) -> float | None:
    """By two clocks, the node's and ours."""
    gpunode, vouch = state.gpunode(name), state.confirmation(name)
    stamps = [gpunode.status.observed_at if gpunode and gpunode.status else ""]
    stamps += [vouch.sampled_at] if vouch else []
    ages_s = [age(stamp, state.epoch_s + now_s) for stamp in stamps]
    return min((age_s for age_s in ages_s if age_s is not None), default=None)


@dataclass(frozen=True, slots=True)
class _Ask:
    resource: str
    #: None where the pod does not ask for a number of bytes.
    count_bytes: int | None
    #: Whether it, or its namespace, says how much it wants at all.
    said: bool


def _asks(state: ClusterState) -> list[_Ask]:
    """Of each GPU container of the pods that have not ended."""
    requests = [state.understand(pod) for pod in state.pods() if not pod.ended]
    return [
        _Ask(
            ask.resource,
            ask.amount.count_bytes if isinstance(ask.amount, Bytes) else None,
            ask.source != "replica",
        )
        for request in requests
        if isinstance(request, VramRequest)
        for ask in request.containers
    ]


def typical_requests(asks: Iterable[_Ask]) -> dict[str, Typical]:
    """By resource, where enough of them say it."""
    wanted: dict[str, list[int]] = {}
    for ask in asks:
        if ask.count_bytes is not None:
            wanted.setdefault(ask.resource, []).append(ask.count_bytes)
    return {
        resource: Typical(len(sizes), median_low(sizes), max(sizes))
        for resource, sizes in wanted.items()
        if len(sizes) >= ENOUGH_PODS
    }


def _closed(look: _Look) -> Iterator[Said]:
    reason = look.node.reason
    if reason is None and look.stale and not _from_the_future(look):
        reason = Reason.STALE_REPORT
    if reason is None:
        return
    if reason is Reason.BAD_NODE_ANNOTATION:
        values = {key: look.annotations.get(key) for key in (RESERVE, DEVICE_CHOICE)}
        given = ", ".join(f"{key}: {value}" for key, value in values.items() if value is not None)
        yield Weight.WARNING, f"takes no pods: it is annotated {given}", _CURES[reason]
        return
    detail = f" ({look.node.detail})" if look.node.detail else ""
    found = f"takes no pods that share a GPU: {reason.sentence}{detail}"
    yield Weight.WARNING, found, _CURES.get(reason, "see /v1/nodes of the debug API")


_AGENT = (
    "see whether the agent runs there: kubectl -n headroom-system get pods -o wide; "
    "it must, for what it does not measure is not given out"
)
_OTHERS = (
    "let one of them give out the node's GPUs: take its scheduler and plugin off the node, or "
    "Headroom's resources off it"
)
_CURES = {
    Reason.NO_REPORT: _AGENT,
    Reason.LABELS_SAY_TOO_LITTLE: f"{_AGENT}; of GPUs that nobody shares the labels of GPU feature "
    "discovery are enough",
    Reason.STALE_REPORT: _AGENT,
    Reason.NOT_INITIALISED: "see whether an extender runs: it sets the ledger up within seconds",
    Reason.BAD_NODE_ANNOTATION: f"right are, for example, {RESERVE}: 512Mi and "
    f"{DEVICE_CHOICE}: predicted",
    Reason.CANNOT_PIN: "see to what the brackets name, or take the annotation "
    f"{DEVICE_CHOICE}: pinned away",
    Reason.MIG_CHANGING: "wait for the MIG manager; its pod says what it waits for",
    Reason.MIG_FAILED: "see the log of the MIG manager's pod there: often a GPU was still in use",
    Reason.MIG_INVALID: "set MIG strategy mixed in the plugin, or cut all GPUs of the node alike",
    Reason.EVICTED_LATELY: "wait, it takes pods again by itself",
    Reason.DRA_MANAGES: _OTHERS,
    Reason.HAMI_MANAGES: _OTHERS,
    Reason.KAI_MANAGES: _OTHERS,
    Reason.GPUSHARE_MANAGES: _OTHERS,
}


def _from_the_future(look: _Look) -> bool:
    """Whoever looks once cannot see the report move, and believes no stamp that is far off."""
    return look.age_s is not None and look.age_s < -CLOCKS_AGREE_S


def _lacking(look: _Look) -> Iterator[Said]:
    if look.status is not None and not look.node.unmeasured:
        yield from lacking(look.status)


def _version(look: _Look) -> Iterator[Said]:
    if look.status is not None:
        yield from differing(look.status, look.version)


def _clock(look: _Look) -> Iterator[Said]:
    yield from ahead(None if look.age_s is None else -look.age_s)


def _unmeasured(look: _Look) -> Iterator[Said]:
    if look.node.reason is None and look.node.unmeasured:
        yield (
            Weight.WARNING,
            "is placed by its labels: what strangers use of its GPUs is not seen",
            "run the agent there",
        )


def _packed(look: _Look) -> Iterator[Said]:
    if any(terms.policy == "packed" for terms in look.sliced):
        yield (
            Weight.ADVICE,
            "its device plugin packs (policy packed): the fullest device comes next, so a pod fits "
            "only while that one has room; with pods of 4-60 GiB and 10 replicas an eighth of the "
            "memory was used, and four fifths with policy distributed",
            "set sharedDevicesAllocationPolicy: distributed in the plugin's configuration",
        )


def _unknown_policy(look: _Look) -> Iterator[Said]:
    if look.status is not None and any(terms.policy == "unknown" for terms in look.sliced):
        yield (
            Weight.ADVICE,
            "how its device plugin chooses is not known: a pod must fit on every device with a "
            "free replica",
            "let the agent read the plugin's configuration; what it lacks is said by: "
            "kubectl get gpunode NAME -o yaml, under status.sources",
        )


def _aligned(look: _Look) -> Iterator[Said]:
    if look.status is None or len({terms.device.numa_node for terms in look.sliced}) < 2:
        return
    policy = look.status.plugin.topology_manager_policy
    if policy == "":
        yield (
            Weight.ADVICE,
            "its topology manager's policy is not known, and its GPUs hang on several NUMA nodes: "
            "a pod must fit on the next device of each of them",
            "let the agent read the kubelet's configuration (RBAC: get nodes/configz)",
        )
    elif policy != "none":
        yield (
            Weight.ADVICE,
            f"its topology manager's policy is {policy}, and its GPUs hang on several NUMA nodes: "
            "a pod must fit on the next device of each of them",
            "set topologyManagerPolicy: none in the kubelet's configuration where pods of one GPU "
            "do not need alignment",
        )


def _any(look: _Look) -> Iterator[Said]:
    if look.shared and look.annotations.get(DEVICE_CHOICE) == DeviceChoice.ANY.value:
        yield (
            Weight.ADVICE,
            f"it is annotated {DEVICE_CHOICE}: any, so a pod must fit on all of its devices; with "
            "pods of 4-60 GiB two fifths of the memory were used, and four fifths with predicted",
            "take the annotation away",
        )


def _several(look: _Look) -> Iterator[Said]:
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


def _replicas(look: _Look) -> Iterator[Said]:
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


def _unannotated(look: _Look) -> Iterator[Said]:
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
                f"({DEFAULT_VRAM}), or set refuse_unannotated",
            )


def _mps_limit(look: _Look) -> Iterator[Said]:
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


_RULES: tuple[Callable[[_Look], Iterator[Said]], ...] = (
    _closed,
    _unmeasured,
    _lacking,
    _version,
    _clock,
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
