"""Rules of the doctor about the feature gate of kube-scheduler that Headroom sets.

With SchedulerPopFromBackoffQ, which is on by default, kube-scheduler retries rejected pods without
back-off while other pods change. kube-scheduler fails to start if it does not know the gate, or no
longer permits disabling it. Then all GPU pods wait.
"""

from collections.abc import Iterator, Sequence

from headroom.doctor.component_pods import ComponentPod, Container
from headroom.doctor.findings import Finding, Weight

#: First and last minor version of kube-scheduler that are known to accept the flag, according to
#: the sources of 1.31.4 to 1.38.0-beta.0. Tests start these schedulers. The chart has the same
#: numbers.
FIRST_WITH_GATE, LAST_WITH_GATE = (1, 33), (1, 38)
BACKOFF_GATE = "SchedulerPopFromBackoffQ=false"
BACKOFF_FLAG = f"--feature-gates={BACKOFF_GATE}"
_KNOWN = "1.33 to 1.38"
_HOW = "Helm: images.kubeScheduler.tag is the version; kustomize: component backoff-gate"


def accepts_gate(minor: tuple[int, ...]) -> bool:
    """Return whether kube-scheduler of this minor version is known to start with
    ``BACKOFF_FLAG``."""
    return FIRST_WITH_GATE <= minor[:2] <= LAST_WITH_GATE


def examine_flags(pods: Sequence[ComponentPod]) -> Iterator[Finding]:
    """Find kube-schedulers that may not start because of the gate, or that should have it.

    ``pods`` includes Headroom's own kube-scheduler and the cluster's kube-scheduler. The latter is
    examined only if Headroom has no kube-scheduler of its own.
    """
    own = [pod for pod in pods if pod.labels.get("app.kubernetes.io/name") == "headroom"]
    schedulers = [*_schedulers(own)] or [*_schedulers(pods)]
    nodes_of: dict[tuple[Weight, str, str], list[str]] = {}
    for pod, container in schedulers if own else ():
        if (problem := _problem(pod, container)) is not None:
            name = f"{pod.metadata.namespace}/{pod.metadata.name}"
            nodes_of.setdefault(problem, []).append(name)
    for (weight, found, do), names in nodes_of.items():
        yield Finding(weight, tuple(sorted(names)), found, do)


def _schedulers(pods: Sequence[ComponentPod]) -> Iterator[tuple[ComponentPod, Container]]:
    for pod in pods:
        for container in pod.spec.containers or ():
            if container.name == "kube-scheduler":
                yield pod, container


def _problem(pod: ComponentPod, container: Container) -> tuple[Weight, str, str] | None:
    minor = container.minor
    arguments = " ".join([*(container.command or ()), *(container.args or ())])
    if BACKOFF_GATE in arguments:
        if minor is None or accepts_gate(minor) or pod.ready:
            return None
        return (
            Weight.WARNING,
            f"kube-scheduler {container.tag} is not ready, and only {_KNOWN} are known to accept "
            f"its flag {BACKOFF_FLAG}: if it does not know the gate, or the gate is locked, it "
            "exits with an error, and all GPU pods wait",
            f"remove the flag ({_HOW})",
        )
    if minor is None or not accepts_gate(minor):
        return None
    return (
        Weight.ADVICE,
        f"kube-scheduler {container.tag} has no flag {BACKOFF_FLAG}: while GPU pods wait and other "
        "pods change, it retries them without a pause",
        f"add the flag ({_HOW})",
    )
