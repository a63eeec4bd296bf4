"""How MIG splits GPUs of a model into instances.

The fractions and numbers of instances come from NVIDIA's MIG user guide, "Supported MIG Profiles".
A layout has equal instances on all GPUs, as MIG strategy *single* requires, so pods request
``nvidia.com/gpu``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headroom.planner.workload import Machine


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of instance."""

    #: Number of instances of the profile on a GPU.
    count: int
    #: Fractions of the GPU's memory and of its SMs that an instance has.
    memory_ratio: float
    sm_ratio: float


#: Maps the first part of a profile's name to the profile, for GPUs with seven and with four slices.
_SEVEN = {
    "1g": Profile(7, 1 / 8, 1 / 7),
    "2g": Profile(3, 2 / 8, 2 / 7),
    "3g": Profile(2, 4 / 8, 3 / 7),
}
_FOUR = {"1g": Profile(4, 1 / 4, 1 / 4), "2g": Profile(2, 2 / 4, 2 / 4)}
PROFILES = tuple(_SEVEN)
_SEVEN_MODELS = re.compile(r"\b(A100|A800|H100|H800|H20|H200|GH200|B200|GB200)\b")
_FOUR_MODELS = re.compile(r"\bA30\b|\bRTX PRO 6000 Blackwell\b")
#: Pods can use at least this ratio of an instance's nominal memory. The driver keeps the rest.
USABLE = 0.9


def profile_of(model: str, name: str) -> Profile | None:
    """Return the profile that begins with this name, such as 1g, or None if the model has none."""
    spaced = model.replace("-", " ")
    if _SEVEN_MODELS.search(spaced):
        return _SEVEN.get(name)
    return _FOUR.get(name) if _FOUR_MODELS.search(spaced) else None


def split_by_mig(machines: Sequence[Machine], name: str) -> list[Machine]:
    """Return the machines that support the profile, with their GPUs split into its instances."""
    found = []
    for machine in machines:
        profile = profile_of(machine.model, name)
        if profile is not None:
            size = int(machine.memory_bytes * profile.memory_ratio * USABLE)
            found.append(
                replace(
                    machine,
                    memory_bytes=size,
                    instances=profile.count,
                    sm_share=profile.sm_ratio,
                )
            )
    return found
