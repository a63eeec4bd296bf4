"""Explains the pods of a workload, such as deploy/llama, whose pods an author usually does not
know by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from headroom.contract.commands import command
from headroom.kubectl.debug_api_client import CommandError, DebugApi
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
    api: DebugApi, namespace: str, kind: str, name: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a line for each pod of the workload, and the explanation of the pod that needs
    attention first.

    Raises ``CommandError`` if it has no pods.
    """
    body = api.get("pods", namespace=namespace, owner=f"{kind}/{name}", limit=MOST_LISTED)
    pods: Sequence[Mapping[str, Any]] = body["pods"]
    if not pods:
        events = command(
            "kubectl", "-n", namespace, "get", "events", "--field-selector", "reason=FailedCreate"
        )
        raise CommandError(
            f"{kind} {namespace}/{name} has no pod that requests a GPU. If it exists, the API "
            f"server may have rejected its pods when they were created: {events}",
            1,
        )
    lines = [f"{kind} {namespace}/{name}: {counted(body['matching'], 'pod')}"]
    lines += [
        f"  {each['name']}: {', '.join(each['states'])}"
        + (f" on node {each['node']}" if each["node"] else "")
        for each in pods
    ]
    if body["remaining"]:
        lines.append(f"  {body['remaining']:,} more: kubectl headroom top pod -n {namespace}")
    chosen = sorted(pods, key=lambda each: bool(each["node"]))[:MOST_EXPLAINED]
    return lines, [api.get("explain", pod=f"{namespace}/{each['name']}") for each in chosen]
