"""Explains the pods of a workload, such as deploy/llama, whose pods an author usually does not
know by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headroom.contract.commands import command
from headroom.kubectl.cluster_changes import Cluster, Created
from headroom.kubectl.debug_api_client import CommandError, DebugApi, NotPermitted
from headroom.kubectl.options import Options
from headroom.kubectl.output import show
from headroom.kubectl.top import counted

#: Maps the names of kinds in kubectl to the kinds. Plurals and capitals are accepted too.
KINDS: Mapping[str, str] = {
    "deploy": "Deployment",
    "deployment": "Deployment",
    "rs": "ReplicaSet",
    "replicaset": "ReplicaSet",
    "sts": "StatefulSet",
    "statefulset": "StatefulSet",
    "ds": "DaemonSet",
    "daemonset": "DaemonSet",
    "job": "Job",
    "cj": "CronJob",
    "cronjob": "CronJob",
    "rollout": "Rollout",
}
#: Name, states and node of a pod. The node is empty while the pod waits.
_State = tuple[str, list[str], str]
#: Maximum number of pods that are listed, and of pods that are explained.
MOST_LISTED, MOST_EXPLAINED = 20, 1


def workload_of(written: str) -> tuple[str, str] | None:
    """Return kind and name if the text is TYPE/NAME of a workload, otherwise None."""
    kind, _, name = written.partition("/")
    kind = kind.lower().partition(".")[0]
    found = KINDS.get(kind) or KINDS.get(kind.removesuffix("s"))
    return (found, name) if found and name and "/" not in name else None


def pod_key(options: Options, api: DebugApi, written: str, namespace: str | None) -> str:
    """Return namespace and name of a pod that is written as NAME, namespace/name or TYPE/NAME.

    A workload stands for its first pod, or for a pod that waits. Prints on stderr which pod this
    is. Raises ``CommandError`` if the workload has no pods.
    """
    if (workload := workload_of(written)) is None:
        return "/".join(options.pod(written, namespace))
    of = options.namespace(namespace) or ""

    def listed(*of_workload: str) -> Sequence[Created]:
        return Cluster(options.kubeconfig, options.context).pods_of(*of_workload)

    states, matching = _states(api, of, *workload, listed)
    pod, *_ = _attention_first(states)[0]
    kind, name = workload
    show(f"{kind} {of}/{name} has {counted(matching, 'pod')}; this is {pod}", error=True)
    return f"{of}/{pod}"


def explain_workload(
    api: DebugApi,
    namespace: str,
    kind: str,
    name: str,
    listed: Callable[[str, str, str], Sequence[Created]],
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a line for each pod of the workload, and the explanation of the pod that needs
    attention first. Raises ``CommandError`` if the workload has no pods."""
    states, matching = _states(api, namespace, kind, name, listed)
    lines = [f"{kind} {namespace}/{name}: {counted(matching, 'pod')}"]
    lines += [
        f"  {pod}: {' '.join(filter(None, (', '.join(words), f'on node {node}' if node else '')))}"
        for pod, words, node in states
    ]
    if more := matching - len(states):
        lines.append(f"  {more:,} more: kubectl -n {namespace} get pods")
    chosen = _attention_first(states)[:MOST_EXPLAINED]
    return lines, [api.get("explain", pod=f"{namespace}/{pod}") for pod, *_ in chosen]


def _attention_first(states: list[_State]) -> list[_State]:
    """Return the pods, those that wait first."""
    return sorted(states, key=lambda each: bool(each[2]))


def _states(
    api: DebugApi,
    namespace: str,
    kind: str,
    name: str,
    listed: Callable[[str, str, str], Sequence[Created]],
) -> tuple[list[_State], int]:
    """Return at most 20 pods of the workload, and the number of all its pods.

    An author may usually read the pods of a namespace, but not a view of all pods. ``listed``
    returns the pods of a workload from the API server in this case. Raises ``CommandError`` if the
    workload has no pods.
    """
    try:
        owner = f"{kind}/{name}"
        body = api.get("pods", namespace=namespace, owner=owner, limit=MOST_LISTED)
        states = [(each["name"], each["states"], each["node"]) for each in body["pods"]]
        matching = body["matching"]
    except NotPermitted:
        created = listed(namespace, kind, name)
        states = [(each.name, [] if each.node else ["waiting"], each.node) for each in created]
        matching, states = len(states), states[:MOST_LISTED]
    if not states:
        events = command(
            "kubectl", "-n", namespace, "get", "events", "--field-selector", "reason=FailedCreate"
        )
        raise CommandError(
            f"{kind} {namespace}/{name} has no pod that requests a GPU. If it exists, the API "
            f"server may have rejected its pods when they were created: {events}",
            1,
        )
    return states, matching
