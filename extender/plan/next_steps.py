"""The next steps after a plan: settings of the device plugin, requests of pods and namespaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract.annotations import DEFAULT_VRAM, VRAM
from extender.plan.scenarios import Configuration, split
from extender.plan.workload import History, Life, Vram, largest_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A workload whose pods can share GPUs."""

    workload: str
    pods: int
    #: The largest need of its pods.
    need_bytes: int
    #: Mean over time of the GPU memory that its pods leave free for others.
    gained_bytes: int

    @property
    def annotation(self) -> str:
        return f"{VRAM}: {quantity(self.need_bytes)}"


def candidates(history: History, vram: Vram) -> list[Candidate]:
    """Return the workloads to annotate, in the order of the memory that they leave to others.

    Empty if the history has no names of workloads: then each pod is a workload of its own.
    """
    _, share = split(history.lives, history.machines, Configuration("predicted", 2, vram))
    by_workload: dict[str, list[Life]] = {}
    for life in share:
        by_workload.setdefault(life.workload, []).append(life)
    if len({life.workload for life in history.lives}) == len(history.lives):
        return []
    sizes = largest_bytes(history.machines)
    found = []
    for workload, lives in by_workload.items():
        needs = [vram.need_bytes(life) or 0 for life in lives]
        gained = sum(
            life.run_s * (_gpu_bytes(life, need, sizes) - need)
            for life, need in zip(lives, needs, strict=True)
        )
        gained_bytes = int(gained / history.span_s)
        found.append(Candidate(workload, len(lives), max(needs), gained_bytes))
    return sorted(found, key=lambda each: (-each.gained_bytes, each.workload))


def _gpu_bytes(life: Life, need_bytes: int, sizes: Mapping[str, int]) -> int:
    """Return the memory of the smallest GPU on which the pod can run with its request."""
    least_bytes = max(need_bytes, life.known_bytes or 0)
    allowed = [size for model, size in sizes.items() if not life.models or model in life.models]
    return min((size for size in allowed if size >= least_bytes), default=need_bytes)


def namespace_defaults(found: Sequence[Candidate]) -> list[tuple[str, str]]:
    """Return namespaces with the annotation of their default: the largest need of their workloads.

    Only workloads with a namespace in their name (``namespace/name``) count.
    """
    largest: dict[str, int] = {}
    for each in found:
        namespace, slash, _ = each.workload.partition("/")
        if slash:
            largest[namespace] = max(largest.get(namespace, 0), each.need_bytes)
    return [
        (namespace, f"{DEFAULT_VRAM}: {quantity(need_bytes)}")
        for namespace, need_bytes in sorted(largest.items())
    ]


def plugin_config(configuration: Configuration) -> str:
    """Return the device plugin's ConfigMap for this number of replicas, as YAML."""
    name = f"gpu-{configuration.replicas}"
    return (
        "# Merge it into the ConfigMap that the device plugin uses (Helm value config.name, or\n"
        "# devicePlugin.config.name of the GPU Operator). Drain each node that is to share, and\n"
        "# label it:\n"
        f"# kubectl label --overwrite node NODE nvidia.com/device-plugin.config={name}\n"
        "apiVersion: v1\n"
        "kind: ConfigMap\n"
        "metadata:\n"
        "  name: nvidia-device-plugin-configs\n"
        "data:\n"
        f"  {name}: |\n"
        "    version: v1\n"
        "    sharing:\n"
        "      timeSlicing:\n"
        "        failRequestsGreaterThanOne: true\n"
        "        resources:\n"
        "        - name: nvidia.com/gpu\n"
        f"          replicas: {configuration.replicas}\n"
    )


def quantity(count_bytes: int) -> str:
    """Return the bytes as a Kubernetes quantity, rounded up to MiB: ``6Gi`` or ``5632Mi``."""
    mib = -(-count_bytes // (1 << 20))
    return f"{mib >> 10}Gi" if mib % 1024 == 0 else f"{mib}Mi"
