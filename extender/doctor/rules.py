"""Rules of the doctor about nodes: what costs the cluster safety or memory, and what to do.

Each rule examines one node and yields what it found there.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from contract.annotations import DEVICE_CHOICE, RESERVE, DeviceChoice
from contract.reasons import Reason
from extender.doctor.agent_sources import (
    CLOCKS_AGREE_S,
    clock_findings,
    source_findings,
    version_findings,
)
from extender.doctor.findings import Finding, PartialFinding, Weight, warnings_first, with_nodes
from extender.doctor.node_facts import NodeFacts, gpu_requests, typical_requests
from extender.doctor.sharing_rules import SHARING_RULES
from extender.state.cluster_state import ClusterState
from extender.state.heartbeats import age


def examine(state: ClusterState, now_s: float, version: str = "") -> list[Finding]:
    """Apply all rules to all GPU nodes; return the findings with the warnings first.

    ``now_s`` is the time of this process's monotonic clock. ``version`` is the version of this
    package, which is compared with the agents' versions.
    """
    requests = gpu_requests(state)
    typical = typical_requests(requests)
    unannotated = Counter(each.resource for each in requests if not each.is_annotated)
    nodes_of: dict[PartialFinding, list[str]] = {}
    for terms in sorted(state.snapshot().nodes, key=lambda node: node.name):
        node = state.node(terms.name)
        offers = node.status.allocatable if node and node.status else None
        if node is None or not any(state.rules.manages(name) for name in offers or ()):
            continue  # a GPUNode without its Node, or a node without managed GPU resources
        facts = NodeFacts(
            terms,
            node.metadata.annotations or {},
            state.report(terms.name, state.gpunode(terms.name)),
            terms.fresh_until_s < now_s,
            _age_s(state, terms.name, now_s),
            version,
            typical,
            unannotated,
        )
        for rule in _RULES:
            for finding in rule(facts):
                nodes_of.setdefault(finding, []).append(terms.name)
    return warnings_first(with_nodes(nodes_of))


def _age_s(state: ClusterState, name: str, now_s: float) -> float | None:
    """Return the age of the node's newest report or heartbeat, or None if it has neither.

    The node's clock sets the timestamp and this machine's clock the current time, so a clock that
    is ahead on the node makes the age negative.
    """
    gpunode, confirmation = state.gpunode(name), state.confirmation(name)
    stamps = [gpunode.status.observed_at if gpunode and gpunode.status else ""]
    stamps += [confirmation.sampled_at] if confirmation else []
    ages_s = [age(stamp, state.epoch_s + now_s) for stamp in stamps]
    return min((age_s for age_s in ages_s if age_s is not None), default=None)


def _closed(facts: NodeFacts) -> Iterator[PartialFinding]:
    reason = facts.node.reason
    if reason is None and facts.stale and not _from_the_future(facts):
        reason = Reason.STALE_REPORT
    if reason is None:
        return
    if reason is Reason.BAD_NODE_ANNOTATION:
        values = {key: facts.annotations.get(key) for key in (RESERVE, DEVICE_CHOICE)}
        given = ", ".join(f"{key}: {value}" for key, value in values.items() if value is not None)
        yield Weight.WARNING, f"takes no pods: it is annotated {given}", _FIXES[reason]
        return
    detail = f" ({facts.node.detail})" if facts.node.detail else ""
    found = f"takes no pods that share a GPU: {reason.sentence}{detail}"
    yield Weight.WARNING, found, _FIXES.get(reason, "see GET /v1/nodes of the debug API")


_AGENT = (
    "check whether the agent runs on the node: kubectl -n headroom-system get pods -o wide; "
    "without its measurements, Headroom reserves no memory there"
)
_FOREIGN_ALLOCATOR = (
    "let only one of them allocate the node's GPUs: remove its scheduler and device plugin from "
    "the node, or remove Headroom's resources from it"
)
_FIXES = {
    Reason.NO_REPORT: _AGENT,
    Reason.LABELS_SAY_TOO_LITTLE: f"{_AGENT}; for unshared GPUs the labels of GPU feature "
    "discovery are enough",
    Reason.STALE_REPORT: _AGENT,
    Reason.NOT_INITIALISED: "check whether an extender runs: it sets up the ledger within seconds",
    Reason.BAD_NODE_ANNOTATION: f"correct the annotation. Example: {RESERVE}: 512Mi and "
    f"{DEVICE_CHOICE}: predicted",
    Reason.CANNOT_PIN: "fix the problem named in parentheses, or remove the annotation "
    f"{DEVICE_CHOICE}: pinned",
    Reason.MIG_CHANGING: "wait for the MIG manager; the log of its pod shows what it waits for",
    Reason.MIG_FAILED: "check the log of the MIG manager's pod on the node; often a GPU was still "
    "in use",
    Reason.MIG_INVALID: "set MIG strategy mixed in the device plugin, or use the same MIG profiles "
    "on all GPUs of the node",
    Reason.EVICTED_LATELY: "wait; the node accepts pods again by itself",
    Reason.DRA_MANAGES: _FOREIGN_ALLOCATOR,
    Reason.HAMI_MANAGES: _FOREIGN_ALLOCATOR,
    Reason.KAI_MANAGES: _FOREIGN_ALLOCATOR,
    Reason.GPUSHARE_MANAGES: _FOREIGN_ALLOCATOR,
}


def _from_the_future(facts: NodeFacts) -> bool:
    """Return whether the newest report is dated in the future.

    The doctor reads the cluster once, so it cannot see the report change. It counts such a report
    as stale for that reason alone, and the clock is the actual problem.
    """
    return facts.age_s is not None and facts.age_s < -CLOCKS_AGREE_S


def _not_steered(facts: NodeFacts) -> Iterator[PartialFinding]:
    steered = facts.annotations.get(DEVICE_CHOICE, "").strip() == DeviceChoice.STEERED.value
    if steered and facts.node.reason is None and facts.node.detail:
        yield (
            Weight.WARNING,
            f"{facts.node.detail}; pods are placed there as on any other node",
            f"remove the obstacle, or the annotation: kubectl annotate node NAME {DEVICE_CHOICE}-",
        )


def _failed_sources(facts: NodeFacts) -> Iterator[PartialFinding]:
    if facts.status is not None and not facts.node.unmeasured:
        yield from source_findings(facts.status)


def _version(facts: NodeFacts) -> Iterator[PartialFinding]:
    if facts.status is not None:
        yield from version_findings(facts.status, facts.version)


def _clock(facts: NodeFacts) -> Iterator[PartialFinding]:
    yield from clock_findings(None if facts.age_s is None else -facts.age_s)


def _unmeasured(facts: NodeFacts) -> Iterator[PartialFinding]:
    if facts.node.reason is None and facts.node.unmeasured:
        yield (
            Weight.WARNING,
            "pods are placed by the node's labels alone: unattributed use of its GPUs is not "
            "measured",
            "run the agent on the node",
        )


_RULES: tuple[Callable[[NodeFacts], Iterator[PartialFinding]], ...] = (
    _closed,
    _not_steered,
    _unmeasured,
    _failed_sources,
    _version,
    _clock,
    *SHARING_RULES,
)
