"""Names of dcgm-exporter's metrics, and the device that the labels of a series identify.

dcgm-exporter 4.9.0 (DCGM 4.7) introduced new names for its metrics, and uses bytes instead of MiB
for memory. Custom lists of metrics can still contain the old names.
"""

import re
from collections.abc import Iterable, Mapping

#: The ratio of SM activity, until 4.8 and since 4.9.0.
SM_ACTIVITY = ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO")
#: GPU utilization: the percentage of time in which any kernel ran. MIG devices have no utilization.
UTILIZATION_PERCENT = "DCGM_FI_DEV_GPU_UTIL"
#: Used memory of the device, in MiB until 4.8 and in bytes since 4.9.0.
USED_MIB, USED_BYTES = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_USED_BYTES"
#: Free memory of the device in the same units.
FREE_MIB, FREE_BYTES = "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_FREE_BYTES"

#: Names of the label in exporters and after relabelling, preferred names first. If the scraped
#: target has a label of the same name, Prometheus renames the exporter's label to ``exported_...``.
UUIDS = ("exported_UUID", "exported_uuid", "UUID", "uuid", "GPU_UUID", "gpu_uuid")
INSTANCES = ("exported_GPU_I_ID", "exported_gpu_i_id", "GPU_I_ID", "gpu_i_id")
_INSTANCE = re.compile("[0-9]{1,4}")

#: UUID of a physical GPU, and the number of the GPU instance, which is None for the whole GPU.
Key = tuple[str, int | None]


def key_of_series(labels: Mapping[str, str]) -> Key | None:
    """Return the device of a series, or None if its labels do not identify one."""
    uuid, instance = label(labels, UUIDS), label(labels, INSTANCES)
    if not uuid or (instance and not _INSTANCE.fullmatch(instance)):
        return None
    return uuid, int(instance) if instance else None


def label(labels: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the first non-empty value of these labels, or an empty string if there is none."""
    return next((labels[name] for name in names if labels.get(name)), "")
