"""Rules of the doctor about parts of Headroom that do not run: no ready pod, or no leader.

The pod of a process that hangs stays ready for a while, but the process no longer renews its Lease.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headroom.contract.commands import command
from headroom.doctor.component_pods import ComponentPod
from headroom.doctor.findings import Finding, Weight

_COMPONENT = "app.kubernetes.io/component"
#: Maps each component to the consequence if none of its pods is ready.
IMPACTS: Mapping[str, str] = {
    "extender": "pods that request GPUs stay pending",
    "webhook": "pods that request GPUs are not created",
    "console": "kubectl headroom and the page do not work",
}
#: A leader renews its Lease every few seconds. After this number of seconds it does not run.
STALE_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Leader:
    """The holder of the Lease of a kube-scheduler."""

    namespace: str
    lease: str
    holder: str
    #: Seconds since the holder renewed the Lease.
    age_s: float


def lease_of(config: object) -> tuple[str, str] | None:
    """Return the namespace and the name of the Lease in a KubeSchedulerConfiguration, or None if
    the scheduler elects no leader."""
    election = config.get("leaderElection") if isinstance(config, Mapping) else None
    election = {} if election is None else election
    if not isinstance(election, Mapping) or election.get("leaderElect") is False:
        return None
    namespace, name = election.get("resourceNamespace"), election.get("resourceName")
    return str(namespace or "kube-system"), str(name or "kube-scheduler")


def leases_of(
    configs: Mapping[str, object], calls: Callable[[object], bool]
) -> list[tuple[str, str]]:
    """Return the Leases of the configurations that call Headroom."""
    found = (lease_of(config) for config in configs.values() if calls(config))
    return sorted({each for each in found if each is not None})


def examine_running(pods: Sequence[ComponentPod], leaders: Sequence[Leader]) -> Iterator[Finding]:
    """Yield the parts that do not run. ``pods`` are the pods of Headroom."""
    of: dict[str, list[ComponentPod]] = {}
    for pod in pods:
        of.setdefault(pod.labels.get(_COMPONENT, ""), []).append(pod)
    for name, impact in IMPACTS.items():
        if name not in of or any(pod.ready for pod in of[name]):
            continue
        namespace, waits = of[name][0].metadata.namespace, of[name][0].waits_for
        which = "-l", f"{_COMPONENT}={name}"
        yield Finding(
            Weight.WARNING,
            tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in of[name])),
            f"no pod of the {name} is ready ({waits}): {impact}",
            "run: " + command("kubectl", "-n", namespace, "describe", "deployment,pods", *which),
        )
    for each in leaders:
        if each.age_s > STALE_AFTER_S:
            yield Finding(
                Weight.WARNING,
                (f"Lease {each.namespace}/{each.lease}",),
                f"kube-scheduler {each.holder or 'of this Lease'} has not renewed it for "
                f"{round(each.age_s)} s, so no scheduler that calls Headroom runs: pods that "
                "request GPUs stay pending",
                "look at its pods and their logs: "
                + command("kubectl", "-n", each.namespace, "get", "pods"),
            )
