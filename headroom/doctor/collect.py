"""Lists the objects of a cluster once, as the user of the kubeconfig or as the pod's service
account."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from urllib.parse import quote

import msgspec
import yaml

from headroom.contract.dra import ResourceClaim
from headroom.contract.kube import KubeStruct, Node, ObjectMeta, PodDisruptionBudget
from headroom.contract.timestamps import age
from headroom.contract.vramprofile import VRAMProfile
from headroom.contract.watched import Relisted
from headroom.doctor.component_pods import ComponentPod
from headroom.doctor.environment import SELECTORS, Environment
from headroom.doctor.running_parts import Leader, leases_of
from headroom.doctor.scheduler_config import KIND, calls_headroom
from headroom.errors import NotSynced
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import KubeApi, Listing, load_configuration
from headroom.runtime.kube.resources import (
    Kind,
    KubeObject,
    decode_identity,
    profile_kind,
    watched_kinds,
)
from headroom.runtime.settings.settings import Settings

PAGE = 500


def list_cluster(
    settings: Settings, kubeconfig: str | None = None, context: str | None = None
) -> list[Relisted]:
    """List all objects that an extender watches.

    Raises ``BadSettings`` if no cluster is configured, and ``NotSynced`` if the API server does not
    answer or rejects the call.
    """
    watched = watched_kinds(settings.agent_namespace)
    # No rule reads disruption budgets or claims. They are not listed, so that users of the doctor
    # need no permission for them.
    kinds = [kind for kind in watched if kind.type not in (PodDisruptionBudget, ResourceClaim)]
    try:
        with closing(_api(kubeconfig, context)) as api:
            return [_list_kind(api, kind) for kind in kinds]
    except ApiError as err:
        if isinstance(err, ApiStatus) and err.status == 404:
            raise NotSynced(
                f"Headroom is not installed in this cluster: {err}; install it "
                "(docs/get-started/helm.md), or use the kubeconfig of another cluster"
            ) from err
        raise NotSynced(
            f"the cluster cannot be listed: {err}; use a kubeconfig that may list nodes, "
            "namespaces, pods, leases, resourceslices, deviceclasses and gpunodes.headroom.gpu"
        ) from err


def list_nodes(kubeconfig: str | None = None, context: str | None = None) -> list[Node]:
    """List only the nodes. Raises the same errors as ``list_cluster``."""
    (kind,) = (kind for kind in watched_kinds("") if kind.type is Node)
    try:
        with closing(_api(kubeconfig, context)) as api:
            return nodes_of([_list_kind(api, kind)])
    except ApiError as err:
        raise NotSynced(f"the nodes cannot be listed: {err}") from err


def nodes_of(listed: Sequence[Relisted]) -> list[Node]:
    """Return the nodes in a result of ``list_cluster``."""
    return [each for kind in listed for each in kind.objects if isinstance(each, Node)]


def list_environment(
    settings: Settings,
    nodes: Sequence[Node],
    kubeconfig: str | None = None,
    context: str | None = None,
) -> Environment:
    """List the pods of other components, kube-scheduler's configurations, and VRAMProfiles.

    ``nodes`` are the nodes of the cluster, which the result includes. The result also names objects
    that cannot be listed. Raises ``BadSettings`` if no cluster is configured.
    """
    pods: dict[str, ComponentPod] = {}
    schedulers: dict[str, object] = {}
    unreadable: list[str] = []
    with closing(_api(kubeconfig, context)) as api:
        try:
            for selector in SELECTORS:
                query = {"labelSelector": selector}
                listed = api.list("/api/v1/pods", _component_pod, page_size=PAGE, query=query)
                pods |= {pod.metadata.uid: pod for pod in listed.items}
        except ApiError as err:
            unreadable.append(f"pods of other components, such as the GPU Operator ({err})")
        for namespace in sorted({"kube-system", settings.agent_namespace}):
            path = f"/api/v1/namespaces/{namespace}/configmaps"
            try:
                for each in api.list(path, _configurations, page_size=PAGE).items:
                    schedulers |= each
            except ApiError as err:
                unreadable.append(f"kube-scheduler's ConfigMaps in {namespace} ({err})")
        leaders: list[Leader] = []
        for namespace, name in leases_of(
            schedulers, lambda config: calls_headroom(config, settings.rules.manages)
        ):
            path = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace)}/leases"
            query = {"fieldSelector": f"metadata.name={name}"}
            try:
                leaders += api.list(path, _leader, page_size=PAGE, query=query).items
            except ApiError as err:
                unreadable.append(f"Lease {namespace}/{name} of kube-scheduler ({err})")
        try:
            profiles = _list_kind(api, profile_kind()).objects
        except ApiError as err:
            profiles = ()
            unreadable.append(f"VRAMProfiles ({err})")
    found = tuple(each for each in profiles if isinstance(each, VRAMProfile))
    return Environment(
        tuple(pods.values()),
        nodes,
        schedulers,
        found,
        [each for each in leaders if each.holder],
        unreadable,
    )


def _api(kubeconfig: str | None, context: str | None) -> KubeApi:
    hint = "without a cluster, use: headroom doctor --fleet FLEET.yaml"
    return KubeApi(load_configuration(kubeconfig, context, hint))


class _ConfigMap(KubeStruct, frozen=True):
    metadata: ObjectMeta
    data: Mapping[str, str] | None = None


class _LeaseSpec(KubeStruct, frozen=True):
    holder_identity: str = ""
    renew_time: str = ""


class _Lease(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: _LeaseSpec = _LeaseSpec()


_lease_decoder = msgspec.json.Decoder(_Lease)
_pod_decoder = msgspec.json.Decoder(ComponentPod)
_config_map_decoder = msgspec.json.Decoder(_ConfigMap)


def _component_pod(raw: msgspec.Raw) -> ComponentPod | None:
    try:
        return _pod_decoder.decode(raw)
    except (ValueError, RecursionError):
        return None  # rules skip pods that cannot be decoded


def _leader(raw: msgspec.Raw) -> Leader | None:
    try:
        lease = _lease_decoder.decode(raw)
    except (ValueError, RecursionError):
        return None
    age_s = age(lease.spec.renew_time, time.time())
    if age_s is None:
        return None
    metadata = lease.metadata
    return Leader(metadata.namespace, metadata.name, lease.spec.holder_identity, age_s)


def _configurations(raw: msgspec.Raw) -> dict[str, object] | None:
    """Return the content of each KubeSchedulerConfiguration in a ConfigMap, by its location. Skip
    invalid YAML.

    Return None if the ConfigMap cannot be decoded.
    """
    try:
        config_map = _config_map_decoder.decode(raw)
    except (ValueError, RecursionError):
        return None
    metadata, configs = config_map.metadata, dict[str, object]()
    for key, text in (config_map.data or {}).items():
        if KIND not in text:
            continue
        try:
            config = yaml.safe_load(text)
        except (ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(config, dict) and config.get("kind") == KIND:
            configs[f"ConfigMap {metadata.namespace}/{metadata.name}, {key}"] = config
    return configs


def _list_kind(api: KubeApi, kind: Kind) -> Relisted:
    """List one kind by the first path that the API server serves. The list is empty if it serves
    none."""
    for path in (kind.path, *kind.other_paths):
        try:
            listing: Listing[KubeObject] = api.list(path, partial(_read, kind), page_size=PAGE)
        except ApiStatus as err:
            if err.status == 404 and kind.other_paths:
                continue  # the API server may serve another version, or none
            raise
        return Relisted(kind.type, tuple(listing.items), time.monotonic())
    return Relisted(kind.type, (), time.monotonic())


def _read(kind: Kind, raw: msgspec.Raw) -> KubeObject | None:
    """Decode an object. If it is invalid, return the part that the extender would keep, or None."""
    try:
        return kind.decode(raw)
    except (ValueError, RecursionError):
        try:
            identity = decode_identity(raw)
        except (ValueError, RecursionError):
            return None
        return kind.salvage(raw, identity)
