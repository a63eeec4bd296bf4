"""Rules of the doctor about GPU resources that Headroom does not manage."""

from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.unmanaged_gpus import unmanaged_gpus
from headroom.doctor.findings import Finding, Weight


def examine_resources(state: Cluster) -> list[Finding]:
    """Find nodes that offer GPUs under names that the settings do not manage."""
    return [
        Finding(
            Weight.WARNING,
            tuple(nodes),
            f"the node offers GPUs as {resource}, which Headroom does not manage: pods that "
            "request it are bound without a check of GPU memory",
            f"add {resource} to the setting resources, or remove the name from the device "
            "plugin's configuration",
        )
        for resource, nodes in unmanaged_gpus(state).items()
    ]
