"""What runs beside Headroom and costs it safety or memory: parts of the GPU Operator that are
broken, device plugins of several versions, autoscalers, other versions of the extender.

It is judged by their pods: by labels, readiness and the tags of images, which is all that shows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from contract.kube import KubeStruct, Node, ObjectMeta
from extender.doctor.agent_sources import UNKNOWN
from extender.doctor.findings import Finding, Said, Weight, together, warnings_first
from extender.doctor.scheduler_config import (
    asks_headroom,
    examine_scheduler,
    offered_resources,
    unmanaged_gpus,
)


class _Container(KubeStruct, frozen=True):
    image: str = ""


class _Spec(KubeStruct, frozen=True):
    node_name: str | None = None
    containers: list[_Container] | None = None


class _Waiting(KubeStruct, frozen=True):
    reason: str = ""


class _State(KubeStruct, frozen=True):
    waiting: _Waiting | None = None


class _ContainerStatus(KubeStruct, frozen=True):
    state: _State | None = None


class _Condition(KubeStruct, frozen=True):
    type: str = ""
    status: str = ""


class _Status(KubeStruct, frozen=True):
    phase: str | None = None
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class Neighbour(KubeStruct, frozen=True):
    """A pod of somebody else's, as the API server shows it."""

    metadata: ObjectMeta
    spec: _Spec = _Spec()
    status: _Status | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def ready(self) -> bool:
        conditions = (self.status.conditions if self.status else None) or ()
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    @property
    def waits_for(self) -> str:
        """As in CrashLoopBackOff; else its phase."""
        status = self.status or _Status()
        containers = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
        for each in containers:
            if each.state and each.state.waiting and each.state.waiting.reason:
                return str(each.state.waiting.reason)
        return status.phase or "not known"

    @property
    def tag(self) -> str:
        """Of its first image; empty where that has none."""
        image = self.spec.containers[0].image if self.spec.containers else ""
        name = image.partition("@")[0].rpartition("/")[2]
        return name.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Environment:
    pods: Sequence[Neighbour] = ()
    nodes: Sequence[Node] = ()
    #: "ConfigMap namespace/name, key" -> the KubeSchedulerConfiguration in it, decoded.
    schedulers: Mapping[str, object] = field(default_factory=dict)
    #: What could not be looked at, and why.
    untold: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    #: Value of the label app of its pods.
    app: str
    #: The operator wants it on nodes where nvidia.com/gpu.deploy.NAME is "true".
    name: str
    without: str


#: The GPU Operator's, in the order in which they start: each waits for those before it.
PARTS = (
    _Part("nvidia-driver-daemonset", "driver", "no GPU of the node can be used"),
    _Part("nvidia-container-toolkit-daemonset", "container-toolkit", "containers get no GPU"),
    _Part("nvidia-operator-validator", "operator-validator", "the parts after it do not start"),
    _Part("nvidia-device-plugin-daemonset", "device-plugin", "the kubelet offers no GPU"),
    _Part(
        "gpu-feature-discovery", "gpu-feature-discovery", "labels of the GPUs are missing or old"
    ),
    _Part("nvidia-dcgm-exporter", "dcgm-exporter", "SM activity may be measured less well"),
    _Part("nvidia-mig-manager", "mig-manager", "MIG is not changed, and a change never ends"),
)
_APP = "app"
_NAME = "app.kubernetes.io/name"
_COMPONENT = "app.kubernetes.io/component"
_PLUGINS = {_APP: "nvidia-device-plugin-daemonset", _NAME: "nvidia-device-plugin"}
_AUTOSCALERS = (
    (_APP, "cluster-autoscaler"),
    (_NAME, "cluster-autoscaler"),
    (_NAME, "aws-cluster-autoscaler"),
    (_NAME, "karpenter"),
)
_KARPENTERS_NODE = "karpenter.sh/nodepool"
#: Which pods these rules are about, as label selectors of which each lists some.
SELECTORS = (
    f"{_APP} in ({', '.join([part.app for part in PARTS] + ['cluster-autoscaler'])})",
    f"{_NAME} in (nvidia-device-plugin, cluster-autoscaler, aws-cluster-autoscaler, karpenter, "
    "headroom)",
)


def examine_surroundings(
    around: Environment,
    manages: Callable[[str], bool],
    version: str,
    best_only: bool = False,
    bind_deadline_s: float = 0.0,
) -> list[Finding]:
    """All that is to be said, warnings first; ``version`` is this package's, ``best_only`` and
    ``bind_deadline_s`` as of ``examine_scheduler``."""
    said: dict[Said, list[str]] = {}
    for rule in (_operator, _plugins):
        for name, one in rule(around):
            said.setdefault(one, []).append(name)
    found = together({one: sorted(set(names)) for one, names in said.items()})
    found += _autoscaler(around)
    found += _extenders(around, version)
    found += _schedulers(around, manages, best_only, bind_deadline_s)
    found += unmanaged_gpus(around.nodes, manages)
    found += [
        Finding(Weight.ADVICE, (), f"not looked at: {what}", "look with an account that may")
        for what in around.untold
    ]
    return warnings_first(found)


def _operator(around: Environment) -> Iterator[tuple[str, Said]]:
    """Of each node the first part that is broken, and those that may only wait for it."""
    by_app: dict[str, dict[str, Neighbour]] = {}
    for pod in sorted(around.pods, key=lambda pod: pod.ready):  # of two on a node, the ready one
        if pod.spec.node_name:
            by_app.setdefault(pod.labels.get(_APP, ""), {})[pod.spec.node_name] = pod
    parts = [part for part in PARTS if part.app in by_app]
    for node in around.nodes:
        name, labels = node.metadata.name, node.metadata.labels or {}
        broken: list[tuple[_Part, str]] = []
        for part in parts:
            there = by_app[part.app].get(name)
            if there is not None and not there.ready:
                broken.append((part, f"is not ready ({there.waits_for})"))
            elif there is None and labels.get(f"nvidia.com/gpu.deploy.{part.name}") == "true":
                broken.append((part, "has no pod there"))
        if not broken:
            continue
        (first, how), *others = broken
        after = f"; after it {', '.join(part.app for part, _ in others)}" if others else ""
        namespace = next(iter(by_app[first.app].values())).metadata.namespace
        weight = Weight.ADVICE if first.name == "dcgm-exporter" else Weight.WARNING
        yield (
            name,
            (
                weight,
                f"the GPU Operator's {first.app} {how}: {first.without}{after}",
                f"see: kubectl -n {namespace} describe pods -l app={first.app}",
            ),
        )


def _plugins(around: Environment) -> Iterator[tuple[str, Said]]:
    plugins = [
        pod
        for pod in around.pods
        if pod.spec.node_name and any(pod.labels.get(k) == v for k, v in _PLUGINS.items())
    ]
    tags = sorted({pod.tag for pod in plugins if pod.tag})
    if len(tags) < 2:
        return
    for pod in plugins:
        if pod.tag and pod.spec.node_name:
            yield (
                pod.spec.node_name,
                (
                    Weight.ADVICE,
                    f"its device plugin is of version {pod.tag}, others of "
                    f"{', '.join(tag for tag in tags if tag != pod.tag)}: versions choose devices "
                    "differently (packed is there from v0.20.0 on)",
                    "roll the same version out everywhere",
                ),
            )


def _autoscaler(around: Environment) -> Iterator[Finding]:
    there = sorted(
        f"{pod.metadata.namespace}/{pod.metadata.name}"
        for pod in around.pods
        if any(pod.labels.get(key) == value for key, value in _AUTOSCALERS)
    )
    if any(_KARPENTERS_NODE in (node.metadata.labels or {}) for node in around.nodes):
        there = there or ["Karpenter"]  # run by the cloud, without a pod here
    if there:
        yield Finding(
            Weight.ADVICE,
            tuple(there),
            "an autoscaler runs, and it counts replicas, not memory: it adds no node for a pod "
            "while a replica is free somewhere, though no GPU has the memory",
            "set replicas to allocatable / typical request, so that they run out when memory does, "
            "or keep as many nodes as kubectl headroom capacity and whatif say are needed",
        )


def _extenders(around: Environment, version: str) -> Iterator[Finding]:
    ours = [
        pod
        for pod in around.pods
        if pod.labels.get(_NAME) == "headroom" and pod.labels.get(_COMPONENT) == "extender"
    ]
    tags = {
        pod.tag.removeprefix("v") for pod in ours if pod.tag[:1].isdigit() or pod.tag[:1] == "v"
    }
    if version not in UNKNOWN and tags - {version}:
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in ours)),
            f"the extender's image is of version {', '.join(sorted(tags))}, and this doctor of "
            f"{version}: it may say what that extender does not do, or the other way round",
            "use the doctor of the same version",
        )


def _schedulers(
    around: Environment,
    manages: Callable[[str], bool],
    best_only: bool,
    bind_deadline_s: float,
) -> Iterable[Finding]:
    """A scheduler that does not ask Headroom may be meant for others: then only that is said, and
    only where no other asks."""
    held, offered = around.schedulers, offered_resources(around.nodes, manages)
    asking = {where: config for where, config in held.items() if asks_headroom(config, manages)}
    for where, config in asking.items():
        for found in examine_scheduler(config, manages, best_only, offered, bind_deadline_s):
            part = f" {found.nodes[0]}" if found.nodes else ""
            yield Finding(found.weight, (where + part,), found.found, found.do)
    if held and not asking:
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(held)),
            "no extender in there manages Headroom's resources: a kube-scheduler that is started "
            "with it does not ask Headroom",
            "add one if it is to place pods with GPUs; see deploy/base/kube-scheduler.yaml",
        )
