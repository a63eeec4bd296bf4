"""Lists the GPUs of AWS and Azure instance types.

On nodes of managed node groups of EKS and node pools of AKS, the cloud's node controller writes a
label with the instance type, and no other label describes the GPUs. Types with fractions of GPUs
(Azure's NV series, g6f) are omitted, because only the driver reports the memory of a fraction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

TYPE = "node.kubernetes.io/instance-type"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of an instance type."""

    model: str
    count: int
    #: Nominal memory of each GPU in GB (10**9 bytes). All listed models have slightly more.
    memory_gb: int


_UP_TO_EIGHT = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
    **dict.fromkeys(("12xlarge", "24xlarge"), 4),
    "48xlarge": 8,
}
_ONE_TO_METAL = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
    "12xlarge": 4,
    "metal": 8,
}
#: For each family, the model, its memory in GB, and the number of GPUs by instance size.
_AMAZON: Mapping[str, tuple[str, int, Mapping[str, int]]] = {
    "g4dn": ("T4", 15, _ONE_TO_METAL),
    "g5": ("A10G", 24, _UP_TO_EIGHT),
    "g6": ("L4", 24, _UP_TO_EIGHT),
    "gr6": ("L4", 24, {"4xlarge": 1, "8xlarge": 1}),
    "g6e": ("L40S", 48, _UP_TO_EIGHT),
    "p3": ("V100", 16, {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "p3dn": ("V100", 32, {"24xlarge": 8}),
    "p4d": ("A100", 40, {"24xlarge": 8}),
    "p4de": ("A100", 80, {"24xlarge": 8}),
    "p5": ("H100", 80, {"4xlarge": 1, "48xlarge": 8}),
    "p5e": ("H200", 141, {"48xlarge": 8}),
    "p5en": ("H200", 141, {"48xlarge": 8}),
}
#: Azure's types in lower case without "Standard_".
_AZURE = {
    **dict.fromkeys(("nc4as_t4_v3", "nc8as_t4_v3", "nc16as_t4_v3"), Gpus("T4", 1, 15)),
    "nc64as_t4_v3": Gpus("T4", 4, 15),
    "nc6s_v3": Gpus("V100", 1, 16),
    "nc12s_v3": Gpus("V100", 2, 16),
    **dict.fromkeys(("nc24s_v3", "nc24rs_v3"), Gpus("V100", 4, 16)),
    "nd40rs_v2": Gpus("V100", 8, 32),
    "nc24ads_a100_v4": Gpus("A100", 1, 80),
    "nc48ads_a100_v4": Gpus("A100", 2, 80),
    "nc96ads_a100_v4": Gpus("A100", 4, 80),
    "nd96asr_v4": Gpus("A100", 8, 40),
    "nd96amsr_a100_v4": Gpus("A100", 8, 80),
    "nc40ads_h100_v5": Gpus("H100 NVL", 1, 94),
    "nc80adis_h100_v5": Gpus("H100 NVL", 2, 94),
    "nd96isr_h100_v5": Gpus("H100", 8, 80),
    "nd96isr_h200_v5": Gpus("H200", 8, 141),
}


def gpus_of(instance_type: str) -> Gpus | None:
    """Return the GPUs of an instance type, or None if it has no whole GPUs or is not listed."""
    if instance_type.startswith("Standard_"):
        return _AZURE.get(instance_type.removeprefix("Standard_").lower())
    family, _, size = instance_type.partition(".")
    model, memory_gb, counts = _AMAZON.get(family, ("", 0, {}))
    count = counts.get(size)
    return None if count is None else Gpus(model, count, memory_gb)


def nominal_gb(model: str) -> list[int]:
    """Return the sizes in which a GPU model is listed, in GB (10**9 bytes)."""
    listed = {(name, gb) for name, gb, _ in _AMAZON.values()}
    listed |= {(each.model, each.memory_gb) for each in _AZURE.values()}
    return sorted(gb for name, gb in listed if name == model)
