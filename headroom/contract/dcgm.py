"""Names of dcgm-exporter's metrics, and the device that the labels of a series identify.

dcgm-exporter 4.9.0 (DCGM 4.7) has new names for its metrics, and bytes instead of MiB for memory.
Custom lists of metrics can still have the old names.
"""

import re
from collections.abc import Iterable, Mapping

#: The ratio of SM activity: until 4.8, and since 4.9.0.
SM_ACTIVITY = ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO")
#: GPU utilization: the part of the time in which any kernel ran, in percent. MIG devices have none.
UTILIZATION_PERCENT = "DCGM_FI_DEV_GPU_UTIL"
#: Used memory of the device: in MiB until 4.8, in bytes since 4.9.0.
USED_MIB, USED_BYTES = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_USED_BYTES"
#: Free memory of the device, with the same units.
FREE_MIB, FREE_BYTES = "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_FREE_BYTES"

#: Names of the label in exporters and after relabelling, the preferred one first. If the scraped
#: target has a label of the same name, Prometheus renames the exporter's to ``exported_...``.
UUIDS = ("exported_UUID", "exported_uuid", "UUID", "uuid", "GPU_UUID", "gpu_uuid")
INSTANCES = ("exported_GPU_I_ID", "exported_gpu_i_id", "GPU_I_ID", "gpu_i_id")
_INSTANCE = re.compile("[0-9]{1,4}")

#: UUID of a physical GPU, and number of the GPU instance; None for the whole GPU.
Key = tuple[str, int | None]


def key_of_series(labels: Mapping[str, str]) -> Key | None:
    """Return the device of a series; None if its labels do not identify one."""
    uuid, instance = label(labels, UUIDS), label(labels, INSTANCES)
    if not uuid or (instance and not _INSTANCE.fullmatch(instance)):
        return None
    return uuid, int(instance) if instance else None


def label(labels: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the value of the first of these labels that has one; empty if none has."""
    return next((labels[name] for name in names if labels.get(name)), "")
