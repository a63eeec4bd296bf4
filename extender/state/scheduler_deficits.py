"""What has to be freed on a node for kube-scheduler's own filters, which are not ours to run."""

from collections.abc import Iterable, Sequence, Set
from decimal import Decimal

from contract.kube import Pod
from extender.state.cluster_state import ClusterState
from extender.state.pod_requests import NOTHING, Demands, amount, demands, total

#: The node-level sum of what pods may use of its GPUs' memory, in MiB, where it is mirrored for
#: kube-scheduler.
MIRROR = "headroom.gpu/vram"


class Needs:
    """As much of everything as its victims would free, of GPUs as much as is missing."""

    def __init__(
        self,
        state: ClusterState,
        name: str,
        asked: Demands,
        proposed: Sequence[Pod],
        held_for: Iterable[Pod],
    ) -> None:
        """``asked`` by the newcomer; ``proposed`` are kube-scheduler's victims on the node, as far
        as they are ours, ``held_for`` are pods whose place on it is held."""
        sitting = {pod.metadata.uid: demands(pod) for pod in state.sitting_on(name)}
        freed = total(sitting[pod.metadata.uid] for pod in proposed)
        node = state.node(name)
        offers = (node.status.allocatable if node and node.status else None) or {}
        beside = total(map(demands, held_for))
        #: What each pod there asks for of one resource, and how much of it has to be freed.
        self._terms: list[tuple[dict[str, int], int]] = []
        for key, wanted in asked.items():
            if wanted <= 0:
                continue
            taken = {uid: _nanos(of.get(key, NOTHING)) for uid, of in sitting.items()}
            if key in offers and (state.rules.manages(key) or key == MIRROR):
                # Of what only GPU pods ask for it is known how much is missing.
                left = amount(offers[key]) - wanted - beside.get(key, NOTHING)
                self._terms.append((taken, sum(taken.values()) - _nanos(left)))
            else:
                self._terms.append((taken, _nanos(freed.get(key, NOTHING))))

    def met(self, gone: Set[str]) -> bool:
        """True of a set whenever it is true of a part of it."""
        return all(
            least <= 0 or sum(taken[uid] for uid in gone if uid in taken) >= least
            for taken, least in self._terms
        )


def _nanos(of: Decimal) -> int:
    return int(of * 1_000_000_000)


def plain(pod: Pod, proposed: Iterable[Pod]) -> bool:
    """Whether nothing but amounts can have kept the pod from the node: then others may leave in the
    place of those whom kube-scheduler proposed."""
    spec, affinity = pod.spec, pod.spec.affinity
    return not (
        (affinity and (affinity.pod_affinity or affinity.pod_anti_affinity))
        or spec.topology_spread_constraints
        or spec.resource_claims
        or any(v.persistent_volume_claim or v.ephemeral for v in spec.volumes or ())
        or any(port.host_port for c in spec.containers or () for port in c.ports or ())
        or any(p.spec.affinity and p.spec.affinity.pod_anti_affinity for p in proposed)
    )
