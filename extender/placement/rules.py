"""The settings that decide placements, as one value handed to every pure function that needs it."""

from dataclasses import dataclass

from contract.annotations import ScoringPolicy

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rules:
    #: Extended resources that are GPUs; a name that ends in ``*`` stands for all that begin so.
    resources: tuple[str, ...] = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*")
    #: Whether pods that annotate nothing, in namespaces without a default, are refused.
    refuse_unannotated: bool = False
    #: Unowned use of a device below this many bytes is never charged.
    unowned_tolerance_bytes: int = 64 * MIB
    #: Whether GPUs that several pods share are given out only where an agent reports them.
    require_report: bool = True
    #: Whether a pod that is no gated one is evicted, too, where it ended on a device without room.
    evict_misses: bool = False
    #: How pods that do not say are scored.
    policy: ScoringPolicy = ScoringPolicy.PACK

    def manages(self, resource: str) -> bool:
        return any(
            resource.startswith(name[:-1]) if name.endswith("*") else resource == name
            for name in self.resources
        )
