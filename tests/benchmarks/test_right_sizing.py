"""Simulates the namespace of ``benchmarks.right_sizing`` without a cluster, with 40 oversized pods
on 20 GPUs.

The webhook's code writes the requests, and the product's code places the pods. The check of the
result shares no code with the product.
"""

import random
from typing import Any

import pytest

from headroom.contract.kube import Pod
from headroom.contract.quantity import parse_bytes
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.request import VramRequest
from headroom.core.recommend.lives import Ending, Life
from headroom.core.whatif.simulation import Placed, Simulation
from tests.admission.reviews import mutated, pod
from tests.admission.test_automatic import known, owned
from tests.builders import DISTRIBUTED, GIB, NOW_S, gpunode, kube_node, shared
from tests.console.test_recommendations import ENDED_S, recorded_profile
from tests.judge import excess
from tests.state.states import seen, state_of

PODS, NODES, GPUS_OF_NODE = 40, 10, 2
#: The memory of each GPU.
GPUS = {f"gpu-{n}-{i}": 24 * GIB for n in range(NODES) for i in range(GPUS_OF_NODE)}


def empty() -> ClusterWriter:
    nodes = [
        gpunode(
            *(shared(f"gpu-{n}-{i}", free=8) for i in range(GPUS_OF_NODE)),
            name=f"n{n}",
            uid=f"gn-{n}",
            plugin=DISTRIBUTED,
        )
        for n in range(NODES)
    ]
    return state_of(*seen(*(kube_node(f"n{n}") for n in range(NODES)), *nodes))


def written(vram: str, chance: random.Random) -> list[dict[str, Any]]:
    """Return the pods of ten owners as the webhook stores them."""
    found = []
    for n in range(PODS):
        if n % 4 == 0:
            typical = chance.uniform(3, 7) * GIB
            lives = [
                Life(
                    int(typical * chance.uniform(0.95, 1.05)),
                    ENDED_S - 60,
                    ENDED_S,
                    Ending.COMPLETED,
                )
                for _ in range(12)
            ]
        obj = owned(vram)
        stored, _ = mutated(obj, known(obj, recorded_profile(lives)))
        stored["metadata"] |= {"uid": f"u-{n}", "name": f"p-{n}"}
        found.append(stored)
    return found


def placed(pods: list[Pod], chance: random.Random) -> list[tuple[str, int]]:
    """Place the pods on empty nodes. Return the GPU and the request of each pod that fits.

    Like the device plugin, this function chooses a device with the fewest pods at random.
    """
    state = empty()
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    found = []
    for each in pods:
        request = state.cluster.understand(each)
        assert isinstance(request, VramRequest)
        at = simulation.place(request, simulation.eligible(each))
        if isinstance(at, Placed):
            (charge,) = at.placement.charges
            device = chance.choice(sorted(charge.candidates.keys() - set(charge.beyond)))
            simulation.observe(each.metadata.uid, at.node, {device: 1})
            found.append((device, parse_bytes(each.annotation("headroom.gpu/vram") or "")))
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_auto_fits_forty_oversized_pods_on_half_of_the_gpus(seed: int) -> None:
    chance = random.Random(seed)
    before = placed([pod(each) for each in written("16Gi", chance)], chance)
    assert len(before) == len(GPUS) == 20
    after = placed([pod(each) for each in written("auto", chance)], chance)
    assert len(after) == PODS
    assert excess(after, GPUS) == {}
    assert max(size for _, size in after) < 12 * GIB
