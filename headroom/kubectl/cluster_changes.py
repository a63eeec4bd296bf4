"""Changes a cluster with the user's own credentials: annotates Nodes, and evicts pods."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headroom.client.kube_protocol import status_of
from headroom.contract.owners import TEMPLATE_HASHES, cron_job_of
from headroom.kubectl.debug_api_client import BAD_INPUT, UNREACHABLE, CommandError
from headroom.kubectl.transport import API_TIMEOUT_S, core_api, unanswered

#: Maximum number of attempts to write a Node, because other clients write it too, such as the
#: kubelet every 10 s.
_ATTEMPTS = 5
#: Maximum number of names in a message.
_MOST_NAMES = 10
_NODE_RULE = "{apiGroups: [''], resources: [nodes], verbs: [get, patch]}"
_EVICTION_RULES = (
    "{apiGroups: [''], resources: [pods], verbs: [get]} and "
    "{apiGroups: [''], resources: [pods/eviction], verbs: [create]}"
)
_LIST_RULE = "{apiGroups: [''], resources: [pods], verbs: [get, list]}"


class Conflict(Exception):
    """Another client has written the object since it was read."""


class Outcome(Enum):
    """Result of a request to evict a pod."""

    ACCEPTED = "accepted"
    #: The pod has ended or was deleted.
    GONE = "gone"
    #: A disruption budget, or a limit of the API server, allows no eviction now.
    LATER = "later"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class NodeRead:
    """A Node's version, its annotations, and whether it is cordoned."""

    version: str
    annotations: Mapping[str, str]
    cordoned: bool = False


@dataclass(frozen=True, slots=True)
class PodRead:
    """The properties of a pod that decide whether it is evicted."""

    uid: str
    #: The pod's controller, such as "DaemonSet fluentd". Empty if the pod has no controller.
    controller: str
    mirror: bool
    #: Whether the pod was deleted, or all its containers have ended.
    ends: bool
    controller_uid: str = ""


@dataclass(frozen=True, slots=True)
class Created:
    """A pod that a controller created."""

    name: str
    uid: str
    #: The node of the pod. Empty while the pod is not bound.
    node: str


class Cluster:
    """The API server of the kubeconfig. All methods raise ``CommandError``."""

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        self._api = core_api(kubeconfig, context)

    def node(self, name: str) -> NodeRead:
        """Read a Node."""
        from kubernetes.client.exceptions import ApiException

        with _explained(f"node {name} cannot be read", _NODE_RULE):
            try:
                node = self._api.read_node(name, _request_timeout=API_TIMEOUT_S)
            except ApiException as err:
                if err.status != 404:
                    raise
                raise CommandError(f"there is no node {name}. {self._node_names()}", 2) from err
        metadata, cordoned = node.metadata, bool(node.spec and node.spec.unschedulable)
        return NodeRead(str(metadata.resource_version), dict(metadata.annotations or {}), cordoned)

    def _node_names(self) -> str:
        from kubernetes.client.exceptions import ApiException

        try:
            listed = self._api.list_node(_request_timeout=API_TIMEOUT_S).items
        except ApiException:
            return "To list all: kubectl get nodes"
        return nodes_listed(str(node.metadata.name) for node in listed)

    def set_cordon(self, name: str, cordoned: bool) -> None:
        """Cordon or uncordon a Node, as kubectl cordon does."""
        patch = {"spec": {"unschedulable": cordoned or None}}
        to_do = "cordoned" if cordoned else "uncordoned"
        with _explained(f"node {name} cannot be {to_do}", _NODE_RULE):
            self._api.patch_node(name, patch, _request_timeout=API_TIMEOUT_S)

    def annotate(self, name: str, read: NodeRead, key: str, value: str | None) -> None:
        """Set an annotation of the Node that was read, or remove it if ``value`` is None. Raises
        ``Conflict``."""
        from kubernetes.client.exceptions import ApiException

        path = "/metadata/annotations"
        pointer = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        patch: list[dict[str, Any]] = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": read.version}
        ]
        if value is None:
            patch += [{"op": "remove", "path": pointer}] if key in read.annotations else []
        else:
            patch += [] if read.annotations else [{"op": "add", "path": path, "value": {}}]
            patch.append({"op": "add", "path": pointer, "value": value})
        with _explained(f"node {name} cannot be changed", _NODE_RULE):
            try:
                self._api.patch_node(name, patch, _request_timeout=API_TIMEOUT_S)
            except ApiException as err:
                if err.status != 409:
                    raise
                raise Conflict from err

    def pod(self, namespace: str, name: str) -> PodRead | None:
        """Read a pod. Return None if there is no pod with this name."""
        from kubernetes.client.exceptions import ApiException

        with _explained(f"pod {namespace}/{name} cannot be read", _EVICTION_RULES):
            try:
                pod = self._api.read_namespaced_pod(name, namespace, _request_timeout=API_TIMEOUT_S)
            except ApiException as err:
                if err.status != 404:
                    raise
                return None
        owner = _controller(pod)
        return PodRead(
            uid=str(pod.metadata.uid),
            controller=f"{owner.kind} {owner.name}" if owner else "",
            controller_uid=str(owner.uid) if owner else "",
            mirror="kubernetes.io/config.mirror" in (pod.metadata.annotations or {}),
            ends=pod.metadata.deletion_timestamp is not None
            or (pod.status is not None and pod.status.phase in ("Succeeded", "Failed")),
        )

    def created_by(self, namespace: str, controller_uid: str) -> list[Created]:
        """Return the pods of a controller, oldest first."""
        with _explained(f"pods of namespace {namespace} cannot be listed", _LIST_RULE):
            listed = self._api.list_namespaced_pod(namespace, _request_timeout=API_TIMEOUT_S).items
        found = [
            pod
            for pod in listed
            if (owner := _controller(pod)) is not None and owner.uid == controller_uid
        ]
        found.sort(key=lambda pod: (str(pod.metadata.creation_timestamp), pod.metadata.name))
        return [
            Created(str(pod.metadata.name), str(pod.metadata.uid), str(pod.spec.node_name or ""))
            for pod in found
        ]

    def pods_of(self, namespace: str, kind: str, name: str) -> list[Created]:
        """Return the pods of a workload, pending pods first.

        The pods of a Deployment belong to a ReplicaSet, whose name ends with the hash of the
        template.
        """
        with _explained(f"pods of namespace {namespace} cannot be listed", _LIST_RULE):
            listed = self._api.list_namespaced_pod(namespace, _request_timeout=API_TIMEOUT_S).items
        found = [pod for pod in listed if (kind, name) in _workloads(pod)]
        found.sort(key=lambda pod: (bool(pod.spec.node_name), pod.metadata.name))
        return [
            Created(str(pod.metadata.name), str(pod.metadata.uid), str(pod.spec.node_name or ""))
            for pod in found
        ]

    def evict(self, namespace: str, name: str, uid: str) -> tuple[Outcome, str]:
        """Evict the pod with this uid. Return the outcome and the API server's reason."""
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException

        body = client.V1Eviction(
            metadata=client.V1ObjectMeta(name=name, namespace=namespace),
            delete_options=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=uid)),
        )
        with _explained(f"pod {namespace}/{name} cannot be evicted", _EVICTION_RULES):
            try:
                self._api.create_namespaced_pod_eviction(
                    name, namespace, body, _request_timeout=API_TIMEOUT_S
                )
            except ApiException as err:
                match err.status:
                    case 404 | 409:  # 409 means that another pod has this name now
                        return Outcome.GONE, ""
                    case 429:
                        return Outcome.LATER, message_of(err)
                    case 500:  # Several disruption budgets can select the pod.
                        return Outcome.FAILED, message_of(err)
                raise
        return Outcome.ACCEPTED, ""


def annotate(
    cluster: Cluster, name: str, key: str, change: Callable[[NodeRead], str | None]
) -> NodeRead:
    """Set an annotation to ``change(node)``. After a conflict, read the Node and try again.

    ``change`` is called with the Node that was read, and returns the value, or None to remove the
    annotation. Returns the Node as it was before the change. Raises ``CommandError``.
    """
    for _ in range(_ATTEMPTS):
        read = cluster.node(name)
        value = change(read)
        if value == read.annotations.get(key):
            return read
        try:
            cluster.annotate(name, read, key, value)
        except Conflict:
            continue
        return read
    raise CommandError(
        f"node {name} was not changed, because other clients changed it during each of {_ATTEMPTS} "
        "attempts; run the command again",
        UNREACHABLE,
    )


def _controller(pod: Any) -> Any:
    """Return the owner reference of the pod's controller, or None if it has none."""
    return next((each for each in pod.metadata.owner_references or () if each.controller), None)


def _workloads(pod: Any) -> Iterator[tuple[str, str]]:
    """Yield kind and name of the pod's controller, and of the controller's own controller."""
    if (owner := _controller(pod)) is None:
        return
    yield owner.kind, owner.name
    if owner.kind == "Job" and (cron_job := cron_job_of(owner.name)):
        yield "CronJob", cron_job
    labels = pod.metadata.labels or {}
    for label, kind in TEMPLATE_HASHES.items():
        if owner.kind == "ReplicaSet" and owner.name.endswith(suffix := f"-{labels.get(label)}"):
            yield kind, owner.name.removesuffix(suffix)


def nodes_listed(names: Iterable[str]) -> str:
    """Return a sentence with the names of at most 10 of the nodes."""
    every = sorted(names)
    if not every:
        return "No node is known"
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return f"Known nodes: {', '.join(every[:_MOST_NAMES])}{more}"


def message_of(err: Any) -> str:
    """Return the message of an ``ApiException``: its first cause, or the message of its status."""
    status = status_of(err.body or b"")
    return status.cause or status.message or f"{err.status} {err.reason}"


@contextmanager
def _explained(what: str, rules: str) -> Iterator[None]:
    """Convert errors of the API server to ``CommandError``. For status 403, add the missing
    rules."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as err:
        if err.status == 403:
            why = f"{message_of(err)}; you need a ClusterRole with {rules}"
        elif err.status == 401:
            why = "401: the API server rejects the kubeconfig's credentials"
        else:
            why = message_of(err)
        exit_code = BAD_INPUT if err.status in (400, 422) else UNREACHABLE
        raise CommandError(f"{what}: {why}", exit_code) from err
    except HTTPError as err:
        raise CommandError(f"{what}: {unanswered(err)}", UNREACHABLE) from err
