"""Explains the pods of a workload, such as deploy/llama, whose pods an author usually does not
know by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headroom.contract.commands import command
from headroom.kubectl.cluster_changes import Created
from headroom.kubectl.debug_api_client import CommandError, DebugApi, NotPermitted
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
    "rollout": "Rollout",
}
#: Maximum number of pods that are listed, and of pods that are explained.
MOST_LISTED, MOST_EXPLAINED = 20, 1


def workload_of(written: str) -> tuple[str, str] | None:
    """Return kind and name if the text is TYPE/NAME of a workload, otherwise None."""
    kind, _, name = written.partition("/")
    kind = kind.lower().partition(".")[0]
    found = KINDS.get(kind) or KINDS.get(kind.removesuffix("s"))
    return (found, name) if found and name and "/" not in name else None


def explain_workload(
    api: DebugApi,
    namespace: str,
    kind: str,
    name: str,
    listed: Callable[[str, str, str], Sequence[Created]],
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a line for each pod of the workload, and the explanation of the pod that needs
    attention first.

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
    lines = [f"{kind} {namespace}/{name}: {counted(matching, 'pod')}"]
    lines += [
        f"  {pod}: {' '.join(filter(None, (', '.join(words), f'on node {node}' if node else '')))}"
        for pod, words, node in states
    ]
    if more := matching - len(states):
        lines.append(f"  {more:,} more: kubectl -n {namespace} get pods")
    chosen = sorted(states, key=lambda each: bool(each[2]))[:MOST_EXPLAINED]
    return lines, [api.get("explain", pod=f"{namespace}/{pod}") for pod, *_ in chosen]
