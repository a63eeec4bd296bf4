"""Computes what to free on a node so that kube-scheduler's own filters, not run here, pass."""

from collections.abc import Iterable, Sequence, Set
from decimal import Decimal

from contract.kube import Pod
from extender.state.cluster_state import ClusterState
from extender.state.pod_requests import NOTHING, Demands, amount, demands, total

#: The extended resource that mirrors the node's total GPU memory for kube-scheduler, in MiB.
MIRROR = "headroom.gpu/vram"


class Needs:
    """The amounts to free on a node: what is missing of GPU resources, and of all other resources
    what kube-scheduler's own victims would free."""

    def __init__(
        self,
        state: ClusterState,
        name: str,
        asked: Demands,
        proposed: Sequence[Pod],
        held_for: Iterable[Pod],
    ) -> None:
        """Compute the amounts.

        ``asked``: the preemptor's requests. ``proposed``: kube-scheduler's victims on the node with
        managed GPUs. ``held_for``: pods for which the node is held.
        """
        sitting = {pod.metadata.uid: demands(pod) for pod in state.pods_on(name)}
        freed = total(sitting[pod.metadata.uid] for pod in proposed)
        node = state.node(name)
        offers = (node.status.allocatable if node and node.status else None) or {}
        held = total(map(demands, held_for))
        #: For each resource, what each pod on the node requests, and the amount to free.
        self._terms: list[tuple[dict[str, int], int]] = []
        for key, wanted in asked.items():
            if wanted <= 0:
                continue
            taken = {uid: _nanos(of.get(key, NOTHING)) for uid, of in sitting.items()}
            if key in offers and (state.rules.manages(key) or key == MIRROR):
                # Only GPU pods request these resources, so the missing amount is known.
                left = amount(offers[key]) - wanted - held.get(key, NOTHING)
                self._terms.append((taken, sum(taken.values()) - _nanos(left)))
            else:
                self._terms.append((taken, _nanos(freed.get(key, NOTHING))))

    def met(self, gone: Set[str]) -> bool:
        """Return whether the pods ``gone`` free enough. If a set does, every superset does too."""
        return all(
            least <= 0 or sum(taken[uid] for uid in gone if uid in taken) >= least
            for taken, least in self._terms
        )


def _nanos(of: Decimal) -> int:
    return int(of * 1_000_000_000)


def plain(pod: Pod, proposed: Iterable[Pod]) -> bool:
    """Return whether only amounts of resources can have kept the pod from the node. Then other pods
    can be evicted in place of those that kube-scheduler proposed."""
    spec, affinity = pod.spec, pod.spec.affinity
    return not (
        (affinity and (affinity.pod_affinity or affinity.pod_anti_affinity))
        or spec.topology_spread_constraints
        or spec.resource_claims
        or any(v.persistent_volume_claim or v.ephemeral for v in spec.volumes or ())
        or any(port.host_port for c in spec.containers or () for port in c.ports or ())
        or any(p.spec.affinity and p.spec.affinity.pod_anti_affinity for p in proposed)
    )
