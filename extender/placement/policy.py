"""The settings that decide placements, as one value handed to every pure function that needs it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache

from contract.annotations import ScoringPolicy

MIB = 1 << 20


class VisibleDevices(Enum):
    """What becomes of a pod that sets NVIDIA_VISIBLE_DEVICES itself where it may be obeyed."""

    REJECT = "reject"
    #: It must have room on every device of the node, and is charged on every one.
    CHARGE = "charge"


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each named term of a score counts (``placement.terms``); not all are 0."""

    packing: float = 5
    prediction: float = 5
    sm_activity: float = 2
    slack: float = 1
    smallest_device: float = 1
    report: float = 1

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def parts(self) -> Mapping[str, float]:
        """Name -> its part of the whole."""
        return _parts(self)


@cache
def _parts(weights: Weights) -> Mapping[str, float]:
    return {name: weight / weights.total for name, weight in asdict(weights).items()}


@dataclass(frozen=True, slots=True)
class Rules:
    #: Extended resources that are GPUs; a name that ends in ``*`` stands for all that begin so.
    resources: tuple[str, ...] = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*")
    #: Whether pods that annotate nothing, in namespaces without a default, are refused.
    reject_unannotated: bool = False
    #: Whether GPUs that several pods share are given out only where an agent reports them.
    require_report: bool = True
    #: Image of the gate that counts on gated nodes; empty: none does.
    gate_image: str = ""
    #: Whether a pod that is no gated one is evicted, too, where it ended on a device without room.
    evict_misses: bool = False
    #: How pods that do not say are scored.
    policy: ScoringPolicy = ScoringPolicy.PACK
    weights: Weights = Weights()
    visible_devices: VisibleDevices = VisibleDevices.REJECT
    #: Whether an ``envFrom`` is taken to set NVIDIA_VISIBLE_DEVICES where it could.
    suspect_env_from: bool = False
    #: How long a pod may use more than it asked for before anybody is told.
    overuse_after_s: float = 60.0
    #: How long a place is held for a pod that others left for, once they have left.
    nomination_hold_s: float = 60.0
    #: Whether pods are evicted for one that only memory keeps from nodes.
    evict_for_memory: bool = False

    def manages(self, resource: str) -> bool:
        return any(
            resource.startswith(name[:-1]) if name.endswith("*") else resource == name
            for name in self.resources
        )
