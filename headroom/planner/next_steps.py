"""The next steps after a plan: device plugin settings, node settings, and annotations.

All pods of a workload get the same annotation, or all keep GPUs of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headroom.contract.annotations import DEFAULT_VRAM, DEVICE_CHOICE, VRAM
from headroom.planner.scenarios import Configuration, Pools
from headroom.planner.wording import plural
from headroom.planner.workload import (
    EXCLUSIVE_ABOVE,
    GIB,
    History,
    Life,
    Vram,
    gpu_bytes,
    largest_bytes,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A workload whose pods can share GPUs."""

    workload: str
    pods: int
    #: The request of the workload's pods, or None if the webhook computes the request (``auto``).
    need_bytes: int | None
    #: Mean over time of the GPU memory that the workload's pods leave free for other pods.
    gained_bytes: int
    #: Number of pods whose measured peak is above the request.
    above: int = 0
    #: Highest peak of these pods, or 0 if there are none.
    highest_bytes: int = 0
    #: Number of pods without a measured peak.
    unmeasured: int = 0

    @property
    def annotation(self) -> str:
        amount = "auto,default=100%" if self.need_bytes is None else quantity(self.need_bytes)
        return f"{VRAM}: {amount}"

    @property
    def remark(self) -> str:
        """The memory that the annotation frees, and the pods for which it may be too small."""
        found = [f"{self.gained_bytes / GIB:,.1f} GiB free for others on average"]
        if self.above:
            found.append(
                f"{self.above:,} of {plural(self.pods, 'pod')} used more, up to "
                f"{self.highest_bytes / GIB:.1f} GiB"
            )
        if self.unmeasured:
            found.append(f"{self.unmeasured:,} of {plural(self.pods, 'pod')} were not measured")
        return "; ".join(found)


@dataclass(frozen=True, slots=True)
class Exclusive:
    """A workload whose pods keep GPUs of their own, and the reason."""

    workload: str
    pods: int
    reason: str


def advice(history: History, vram: Vram) -> tuple[list[Candidate], list[Exclusive]]:
    """Return the workloads to annotate, and all other workloads.

    The first list is sorted by the memory that a workload leaves to others, the second by its
    number of pods, both descending.

    Both are empty if the history has no names of workloads, because then each pod counts as a
    workload of its own.
    """
    by_workload: dict[str, list[Life]] = {}
    for life in history.lives:
        by_workload.setdefault(life.workload, []).append(life)
    if not history.has_workloads:
        return [], []
    pools = Pools(history.machines, Configuration("predicted", 2, vram))
    sizes = largest_bytes(history.machines)
    share, stay = list[Candidate](), list[Exclusive]()
    for workload, lives in by_workload.items():
        # Recommendations change from pod to pod, so only the newest counts.
        decisive = lives[-1:] if vram.source == "recommendations" else lives
        if any(map(pools.shares, decisive)):
            share.append(_candidate(history, workload, lives, vram, sizes))
        else:
            stay.append(Exclusive(workload, len(lives), _reason(lives, vram, sizes)))
    return (
        sorted(share, key=lambda each: (-each.gained_bytes, each.workload)),
        sorted(stay, key=lambda each: (-each.pods, each.workload)),
    )


def _candidate(
    history: History, workload: str, lives: Sequence[Life], vram: Vram, sizes: Mapping[str, int]
) -> Candidate:
    gained = 0.0
    for life in lives:
        need_bytes = vram.need_bytes(life)
        if need_bytes is not None:
            gained += life.run_s * max(0, _today_bytes(life, need_bytes, sizes) - need_bytes)
    peaks = [life.peak_bytes for life in lives if life.peak_bytes is not None]
    need_bytes = None if vram.source == "recommendations" else vram.need_bytes(lives[0])
    above = 0 if need_bytes is None else sum(peak > need_bytes for peak in peaks)
    return Candidate(
        workload,
        len(lives),
        need_bytes,
        int(gained / history.span_s),
        above,
        max(peaks, default=0) if above else 0,
        len(lives) - len(peaks),
    )


def _today_bytes(life: Life, need_bytes: int, sizes: Mapping[str, int]) -> int:
    """Return the memory of the smallest GPU on which the pod can run with its request."""
    least_bytes = max(need_bytes, life.known_bytes or 0)
    allowed = [size for model, size in sizes.items() if not life.models or model in life.models]
    return min((size for size in allowed if size >= least_bytes), default=need_bytes)


def _reason(lives: Sequence[Life], vram: Vram, sizes: Mapping[str, int]) -> str:
    """Return why the pods of a workload keep GPUs of their own."""
    last = lives[-1]
    gpus = max(life.gpus for life in lives)
    if gpus > 1:
        several = sum(life.gpus > 1 for life in lives)
        if several == len(lives):
            return f"{gpus} GPUs a pod"
        return f"{several:,} of {plural(len(lives), 'pod')} have up to {gpus} GPUs"
    need_bytes = vram.need_bytes(last)
    if need_bytes is None:
        if vram.source == "recommendations":
            return "has no recommendation, and requests whole GPUs"
        return "requests whole GPUs" if vram.source == "requests" else "has no measured peak"
    size_bytes = gpu_bytes(last, vram, sizes)
    limit_bytes = EXCLUSIVE_ABOVE * size_bytes
    if need_bytes <= limit_bytes:
        return "fits on no node"
    large = sum((vram.own_bytes(life) or 0) > limit_bytes for life in lives)
    needs = f"{min(need_bytes, size_bytes) / GIB:.1f} GiB"
    if large < len(lives):
        return f"{large:,} of {plural(len(lives), 'pod')} need more than 80 %, up to {needs}"
    return f"needs {needs}"


def namespace_defaults(
    share: Sequence[Candidate], stay: Sequence[Exclusive]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return namespaces with the annotation of their default, and namespaces that should have no
    default with one of their exclusive workloads.

    The default is the largest need of the namespace's workloads. A namespace with an exclusive
    workload gets no default, because the default would also apply to pods that keep GPUs of their
    own. A workload counts only if its name contains the namespace (``namespace/name``) and the
    webhook does not compute its request.
    """
    largest: dict[str, int] = {}
    for each in share:
        namespace, slash, _ = each.workload.partition("/")
        if slash and each.need_bytes is not None:
            need_bytes = max(each.need_bytes, each.highest_bytes)
            largest[namespace] = max(largest.get(namespace, 0), need_bytes)
    without: dict[str, str] = {}
    for other in stay:
        namespace, slash, _ = other.workload.partition("/")
        if slash and largest.pop(namespace, None) is not None:
            without[namespace] = other.workload
    defaults = [
        (namespace, f"{DEFAULT_VRAM}: {quantity(need_bytes)}")
        for namespace, need_bytes in sorted(largest.items())
    ]
    return defaults, sorted(without.items())


def plugin_config(configuration: Configuration) -> str:
    """Return the device plugin's ConfigMap for this number of replicas, as YAML."""
    name = config_name(configuration)
    # On steered nodes, a container with several replicas gets different GPUs.
    rejects = "false" if configuration.choice == "steered" else "true"
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
        f"        failRequestsGreaterThanOne: {rejects}\n"
        "        resources:\n"
        "        - name: nvidia.com/gpu\n"
        f"          replicas: {configuration.replicas}\n"
    )


def config_name(configuration: Configuration) -> str:
    """Return the name that the configuration has in the device plugin's ConfigMap."""
    return f"gpu-{configuration.replicas}"


def device_choice(configuration: Configuration) -> str:
    """Return the command that sets the device choice on the nodes that share GPUs."""
    return (
        f"kubectl annotate --overwrite node -l nvidia.com/device-plugin.config="
        f"{config_name(configuration)} {DEVICE_CHOICE}={configuration.choice}"
    )


def quantity(count_bytes: int) -> str:
    """Return the bytes as a Kubernetes quantity, rounded up to MiB: ``6Gi`` or ``5632Mi``."""
    mib = -(-count_bytes // (1 << 20))
    return f"{mib >> 10}Gi" if mib % 1024 == 0 else f"{mib}Mi"
