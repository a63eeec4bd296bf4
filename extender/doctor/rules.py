"""What costs a cluster safety or memory, and what to do about it, from what is known of it now.

Each rule looks at one node and says what it found there and what helps.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from contract.annotations import DEVICE_CHOICE, RESERVE, DeviceChoice
from contract.reasons import Reason
from extender.doctor.agent_sources import CLOCKS_AGREE_S, ahead, differing, lacking
from extender.doctor.findings import Finding, Said, Weight, together, warnings_first
from extender.doctor.node_facts import Look, asked, typical_requests
from extender.doctor.sharing_rules import SHARING_RULES
from extender.state.cluster_state import ClusterState
from extender.state.heartbeats import age


def examine(state: ClusterState, now_s: float, version: str = "") -> list[Finding]:
    """All that is to be said, warnings first; ``now_s`` is the receiver's monotonic clock, and
    ``version`` is that of this package, with which the agents' are compared."""
    asks = asked(state)
    typical, silent = typical_requests(asks), Counter(a.resource for a in asks if not a.said)
    said: dict[Said, list[str]] = {}
    for terms in sorted(state.snapshot().nodes, key=lambda node: node.name):
        node = state.node(terms.name)
        offers = node.status.allocatable if node and node.status else None
        if node is None or not any(state.rules.manages(name) for name in offers or ()):
            continue  # a GPUNode without its Node, or a node without GPUs of ours
        look = Look(
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


def _closed(look: Look) -> Iterator[Said]:
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


def _from_the_future(look: Look) -> bool:
    """Whoever looks once cannot see the report move, and believes no stamp that is far off."""
    return look.age_s is not None and look.age_s < -CLOCKS_AGREE_S


def _unsteered(look: Look) -> Iterator[Said]:
    steered = look.annotations.get(DEVICE_CHOICE, "").strip() == DeviceChoice.STEERED.value
    if steered and look.node.reason is None and look.node.detail:
        yield (
            Weight.WARNING,
            f"{look.node.detail}; pods are placed there as on any other node",
            f"remove the obstacle, or the annotation: kubectl annotate node NAME {DEVICE_CHOICE}-",
        )


def _lacking(look: Look) -> Iterator[Said]:
    if look.status is not None and not look.node.unmeasured:
        yield from lacking(look.status)


def _version(look: Look) -> Iterator[Said]:
    if look.status is not None:
        yield from differing(look.status, look.version)


def _clock(look: Look) -> Iterator[Said]:
    yield from ahead(None if look.age_s is None else -look.age_s)


def _unmeasured(look: Look) -> Iterator[Said]:
    if look.node.reason is None and look.node.unmeasured:
        yield (
            Weight.WARNING,
            "is placed by its labels: what strangers use of its GPUs is not seen",
            "run the agent there",
        )


_RULES: tuple[Callable[[Look], Iterator[Said]], ...] = (
    _closed,
    _unsteered,
    _unmeasured,
    _lacking,
    _version,
    _clock,
    *SHARING_RULES,
)
