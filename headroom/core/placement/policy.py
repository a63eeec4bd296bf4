"""Settings that decide placements. They are passed as one value to the functions that need them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache

from headroom.contract.annotations import ScoringPolicy
from headroom.contract.dra import IMPLICIT_GPU_RESOURCES

MIB = 1 << 20


class VisibleDevices(Enum):
    """How to treat pods that set NVIDIA_VISIBLE_DEVICES, on nodes that may honor the variable."""

    #: Nodes that may honor the variable reject the pod.
    REJECT = "reject"
    #: The pod must fit on every device of the node, and gets a reservation on every device.
    CHARGE = "charge"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the score's terms (``placement.score_terms``). At least one of them is above
    0."""

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
        """The share of each term in the total weight, 0..1, by name."""
        return _parts(self)


@cache
def _parts(weights: Weights) -> Mapping[str, float]:
    return {name: weight / weights.total for name, weight in asdict(weights).items()}


@dataclass(frozen=True, slots=True)
class LargestDevice:
    """The largest device of a resource, as the administrator configured it. Larger devices accept
    no pods."""

    resource: str
    memory_bytes: int
    #: Minimum number of replicas of a device, which is 1 if it is not shared.
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Rules:
    #: Names of extended resources that Headroom manages. A name that ends in ``*`` is a prefix.
    resources: tuple[str, ...] = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*")
    #: The largest device of each resource. For a resource without an entry, it is the largest
    #: device that any agent reports.
    largest_devices: tuple[LargestDevice, ...] = ()
    #: Whether to reject pods without a VRAM annotation in namespaces without a default.
    reject_unannotated: bool = False
    #: Whether shared GPUs are available only if an agent reports them.
    require_report: bool = True
    #: Image of the gate that pods on gated nodes must have. If it is empty, no gate is accepted.
    gate_image: str = ""
    #: Whether to evict pods from a device without enough memory even if they have no gate.
    evict_misses: bool = False
    #: Scoring policy of pods without a policy annotation.
    policy: ScoringPolicy = ScoringPolicy.FRAGMENTATION
    weights: Weights = Weights()
    visible_devices: VisibleDevices = VisibleDevices.REJECT
    #: Whether an ``envFrom`` that could set NVIDIA_VISIBLE_DEVICES is assumed to do so.
    suspect_env_from: bool = False
    #: Seconds for which a pod may use more than it requested before Headroom reports it.
    overuse_after_s: float = 60.0
    #: Whether to evict pods that use more than they reserved, by default and with the annotation
    #: ``headroom.gpu/on-overuse: report``.
    evict_overuse: bool = False
    overuse_opt_out: bool = False
    #: Free memory below which a device with an overusing pod is under pressure.
    overuse_margin_bytes: int = 256 * MIB
    #: Maximum time in seconds for which a pod that starts alone keeps other pods from starting.
    max_startup_timeout_s: int = 3600
    #: Seconds for which memory stays held for a preemptor after its victims are gone.
    nomination_hold_s: float = 60.0
    #: Whether to evict pods for a pod that only lacks memory.
    evict_for_memory: bool = False

    def manages(self, resource: str) -> bool:
        """Return whether Headroom decides about pods that request this extended resource.

        These are the resources in ``resources``, and the resources by which pods request GPUs only
        from DRA.
        """
        return resource in IMPLICIT_GPU_RESOURCES or any(
            resource.startswith(name[:-1]) if name.endswith("*") else resource == name
            for name in self.resources
        )
