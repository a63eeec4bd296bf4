"""Rules of the doctor about components other than Headroom.

They find failing parts of the GPU Operator, device plugins of several versions, autoscalers,
extenders of another version, and unsuitable configurations and flags of kube-scheduler. They
identify a component by the labels of its pods, and judge it by their readiness and image tags."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headroom.contract.commands import command
from headroom.contract.kube import Node
from headroom.contract.vramprofile import VRAMProfile
from headroom.doctor.component_pods import ComponentPod
from headroom.doctor.findings import Finding, PartialFinding, Weight, warnings_first, with_nodes
from headroom.doctor.node_rules import UNKNOWN
from headroom.doctor.running_parts import Leader, examine_running
from headroom.doctor.scheduler_config import (
    calls_headroom,
    examine_scheduler,
    offered_resources,
)
from headroom.doctor.scheduler_flags import examine_flags
from headroom.runtime.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Environment:
    pods: Sequence[ComponentPod] = ()
    nodes: Sequence[Node] = ()
    #: The decoded KubeSchedulerConfiguration of each ConfigMap, by "ConfigMap namespace/name, key".
    schedulers: Mapping[str, object] = field(default_factory=dict)
    profiles: Sequence[VRAMProfile] = ()
    #: The leaders of the kube-schedulers that call Headroom.
    leaders: Sequence[Leader] = ()
    #: Objects that could not be read, each with its error.
    unreadable: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    #: Value of the label ``app`` on the part's pods.
    app: str
    #: The operator deploys the part to nodes whose label nvidia.com/gpu.deploy.NAME is "true".
    name: str
    #: The consequence of a failure of this part.
    impact: str


#: Parts of the GPU Operator in the order in which they start. Each waits for all parts before it.
PARTS = (
    _Part("nvidia-driver-daemonset", "driver", "no GPU of the node can be used"),
    _Part("nvidia-container-toolkit-daemonset", "container-toolkit", "containers get no GPU"),
    _Part("nvidia-operator-validator", "operator-validator", "the later parts do not start"),
    _Part("nvidia-device-plugin-daemonset", "device-plugin", "the kubelet offers no GPU"),
    _Part("gpu-feature-discovery", "gpu-feature-discovery", "GPU labels are missing or outdated"),
    _Part("nvidia-dcgm-exporter", "dcgm-exporter", "SM activity may be measured less exactly"),
    _Part("nvidia-mig-manager", "mig-manager", "changes to the MIG layout never complete"),
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
#: The first minor version of kube-scheduler that can use ``preempt_for_memory``.
PREEMPTS_FOR_MEMORY = (1, 38)
_KARPENTER_LABEL = "karpenter.sh/nodepool"
#: Label selectors that together list all pods that the rules read.
SELECTORS = (
    f"{_APP} in ({', '.join([part.app for part in PARTS] + ['cluster-autoscaler'])})",
    f"{_NAME} in (nvidia-device-plugin, cluster-autoscaler, aws-cluster-autoscaler, karpenter, "
    "headroom)",
    "component=kube-scheduler",
)


def examine_environment(
    environment: Environment, settings: Settings, version: str
) -> list[Finding]:
    """Apply all rules. Return the findings, warnings first.

    ``settings`` are the extender's settings, and ``version`` is the version of this package.
    """
    nodes_of: dict[PartialFinding, list[str]] = {}
    for rule in (_operator, _plugins):
        for name, finding in rule(environment):
            nodes_of.setdefault(finding, []).append(name)
    found = with_nodes({finding: sorted(set(names)) for finding, names in nodes_of.items()})
    found += _autoscaler(environment)
    found += _extenders(environment, version)
    ours = [pod for pod in environment.pods if pod.labels.get(_NAME) == "headroom"]
    found += examine_running(ours, environment.leaders)
    found += _recorder(environment)
    found += _schedulers(environment, settings)
    found += _preemption(environment, settings)
    found += examine_flags(environment.pods)
    found += [
        Finding(Weight.ADVICE, (), f"not read: {what}", "use an account that may list them")
        for what in environment.unreadable
    ]
    return warnings_first(found)


def _operator(environment: Environment) -> Iterator[tuple[str, PartialFinding]]:
    """Yield the first failing part of each node, and the parts that may only wait for it."""
    by_app: dict[str, dict[str, ComponentPod]] = {}
    # Ready pods come last, so they override other pods of the same part on their node.
    for pod in sorted(environment.pods, key=lambda pod: pod.ready):
        if pod.spec.node_name:
            by_app.setdefault(pod.labels.get(_APP, ""), {})[pod.spec.node_name] = pod
    parts = [part for part in PARTS if part.app in by_app]
    for node in environment.nodes:
        name, labels = node.metadata.name, node.metadata.labels or {}
        failing: list[tuple[_Part, str]] = []
        for part in parts:
            pod_there = by_app[part.app].get(name)
            if pod_there is not None and not pod_there.ready:
                failing.append((part, f"is not ready ({pod_there.waits_for})"))
            elif pod_there is None and labels.get(f"nvidia.com/gpu.deploy.{part.name}") == "true":
                failing.append((part, "has no pod on the node"))
        if not failing:
            continue
        (first, problem), *others = failing
        waiting = ", ".join(part.app for part, _ in others)
        after = f"; these parts may wait for it: {waiting}" if others else ""
        namespace = next(iter(by_app[first.app].values())).metadata.namespace
        weight = Weight.ADVICE if first.name == "dcgm-exporter" else Weight.WARNING
        yield (
            name,
            (
                weight,
                f"the GPU Operator's {first.app} {problem}: {first.impact}{after}",
                "run: "
                + command("kubectl", "-n", namespace, "describe", "pods", "-l", f"app={first.app}"),
            ),
        )


def _plugins(environment: Environment) -> Iterator[tuple[str, PartialFinding]]:
    """Yield a finding for each node with a device plugin, if the plugins' versions differ."""
    plugins = [
        pod
        for pod in environment.pods
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
                    f"the device plugin has version {pod.tag}, and other nodes have "
                    f"{', '.join(tag for tag in tags if tag != pod.tag)}: versions choose devices "
                    "differently (policy packed exists since v0.20.0)",
                    "deploy the same version on all nodes",
                ),
            )


def _autoscaler(environment: Environment) -> Iterator[Finding]:
    names = sorted(
        f"{pod.metadata.namespace}/{pod.metadata.name}"
        for pod in environment.pods
        if any(pod.labels.get(key) == value for key, value in _AUTOSCALERS)
    )
    if any(_KARPENTER_LABEL in (node.metadata.labels or {}) for node in environment.nodes):
        names = names or ["Karpenter"]  # the cloud provider runs it, without a pod in this cluster
    if names:
        yield Finding(
            Weight.ADVICE,
            tuple(names),
            "an autoscaler runs, and it counts replicas, not memory: while any replica is free, it "
            "adds no node for a pod, even if no GPU has enough free memory",
            "set replicas to allocatable memory / typical request, so that replicas and memory run "
            "out together, or keep as many nodes as kubectl headroom capacity and whatif show",
        )


def _extenders(environment: Environment, version: str) -> Iterator[Finding]:
    extenders = [
        pod
        for pod in environment.pods
        if pod.labels.get(_NAME) == "headroom" and pod.labels.get(_COMPONENT) == "extender"
    ]
    tags = {
        pod.tag.removeprefix("v")
        for pod in extenders
        if pod.tag[:1].isdigit() or pod.tag[:1] == "v"
    }
    if version not in UNKNOWN and tags - {version}:
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in extenders)),
            f"the extender's image has version {', '.join(sorted(tags))}, and this doctor has "
            f"version {version}: the two may treat the same node differently",
            "use the doctor of the extender's version",
        )


def _preemption(environment: Environment, settings: Settings) -> Iterator[Finding]:
    """Check whether the kube-schedulers in the extender's pods support ``preempt_for_memory``."""
    minors = [
        container.minor
        for pod in environment.pods
        if pod.labels.get(_NAME) == "headroom" and pod.labels.get(_COMPONENT) == "extender"
        for container in pod.spec.containers or ()
        if container.name == "kube-scheduler" and container.minor
    ]
    if not minors:
        return
    oldest = "kube-scheduler " + ".".join(map(str, min(minors)))
    if settings.preempt_for_memory and min(minors) < PREEMPTS_FOR_MEMORY:
        yield Finding(
            Weight.WARNING,
            (),
            f"preempt_for_memory is true, and {oldest} cannot preempt pods for GPU memory: the "
            "setting has no effect, except for a few useless retries a minute",
            "set preempt_for_memory: false, or use kube-scheduler 1.38 or newer. With older "
            "versions, evict_for_memory: true evicts pods for GPU memory",
        )
    if settings.evict_for_memory and min(minors) >= PREEMPTS_FOR_MEMORY:
        yield Finding(
            Weight.ADVICE,
            (),
            f"evict_for_memory is true, and {oldest} can preempt pods for GPU memory itself, "
            "sooner than Headroom",
            "set preempt_for_memory: true and evict_for_memory: false",
        )


def _recorder(environment: Environment) -> Iterator[Finding]:
    """Yield a finding if Headroom is installed but no pod of its recorder is ready."""
    by_component: dict[str, list[ComponentPod]] = {}
    for pod in environment.pods:
        if pod.labels.get(_NAME) == "headroom":
            by_component.setdefault(pod.labels.get(_COMPONENT, ""), []).append(pod)
    recorders = by_component.get("recorder", [])
    if "extender" not in by_component or any(pod.ready for pod in recorders):
        return
    namespace = by_component["extender"][0].metadata.namespace
    names = (f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in recorders)
    which = "-l", "app.kubernetes.io/component=recorder"
    problem = "is ready" if recorders else "exists"
    yield Finding(
        Weight.ADVICE,
        tuple(sorted(names)),
        f"no pod of the recorder {problem}: lives of containers that end now are not recorded, so "
        "recommended requests become outdated",
        "run: " + command("kubectl", "-n", namespace, "describe", "deployment,pods", *which),
    )


def _schedulers(environment: Environment, settings: Settings) -> Iterable[Finding]:
    """Yield findings about kube-scheduler configurations that call Headroom.

    A configuration that does not call Headroom may be for other pods. So it is a finding only if no
    configuration calls Headroom.
    """
    configs, manages = environment.schedulers, settings.rules.manages
    offered = offered_resources(environment.nodes, manages)
    calling = {
        where: config for where, config in configs.items() if calls_headroom(config, manages)
    }
    for where, config in calling.items():
        for found in examine_scheduler(config, settings, offered):
            part = f" {found.nodes[0]}" if found.nodes else ""
            yield Finding(found.weight, (where + part,), found.found, found.do)
    if configs and not calling:
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(configs)),
            "no extender in this configuration manages Headroom's resources: a kube-scheduler with "
            "it does not call Headroom",
            "add the extender if this scheduler places GPU pods; see "
            "deploy/base/kube-scheduler.yaml",
        )
