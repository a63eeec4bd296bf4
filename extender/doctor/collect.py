"""A cluster listed once, through the kubeconfig or the pod's own account."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import yaml

from contract.kube import KubeStruct, Node, ObjectMeta, PodDisruptionBudget
from extender.config.settings import Settings
from extender.doctor.environment import SELECTORS, Environment, Neighbour
from extender.doctor.scheduler_config import KIND
from extender.errors import NotSynced
from extender.kube.client import ApiError, ApiStatus, KubeApi, Listing, load_configuration
from extender.kube.resources import Kind, KubeObject, decode_identity, watched_kinds
from extender.state.changes import Relisted

PAGE = 500


def list_cluster(
    settings: Settings, kubeconfig: str | None = None, context: str | None = None
) -> list[Relisted]:
    """All that an extender watches, as it is now.

    Raises ``BadSettings`` where no cluster is configured, ``NotSynced`` where it does not tell.
    """
    api = _api(kubeconfig, context)
    try:
        watched = watched_kinds(settings.agent_namespace)
        # Nothing that is said here hangs on disruption budgets: nobody needs rights for them.
        kinds = [kind for kind in watched if kind.type is not PodDisruptionBudget]
        return [_listed(api, kind) for kind in kinds]
    except ApiError as err:
        raise NotSynced(
            f"the cluster cannot be looked at: {err}; right is a kubeconfig that may list nodes, "
            "namespaces, pods, leases, resourceslices and gpunodes.headroom.gpu"
        ) from err
    finally:
        api.close()


def list_nodes(kubeconfig: str | None = None, context: str | None = None) -> list[Node]:
    """Lists the nodes alone. Raises as ``list_cluster``."""
    api = _api(kubeconfig, context)
    (kind,) = (kind for kind in watched_kinds("") if kind.type is Node)
    try:
        return nodes_of([_listed(api, kind)])
    except ApiError as err:
        raise NotSynced(f"the nodes cannot be listed: {err}") from err
    finally:
        api.close()


def nodes_of(listed: Sequence[Relisted]) -> list[Node]:
    return [each for kind in listed for each in kind.objects if isinstance(each, Node)]


def list_surroundings(
    settings: Settings,
    nodes: Sequence[Node],
    kubeconfig: str | None = None,
    context: str | None = None,
) -> Environment:
    """What runs beside Headroom on a cluster with ``nodes``, as far as it may be looked at.

    Raises ``BadSettings`` where no cluster is configured.
    """
    api = _api(kubeconfig, context)
    pods: dict[str, Neighbour] = {}
    schedulers: dict[str, object] = {}
    untold: list[str] = []
    try:
        try:
            for selector in SELECTORS:
                query = {"labelSelector": selector}
                listed = api.list("/api/v1/pods", _neighbour, page_size=PAGE, query=query)
                pods |= {pod.metadata.uid: pod for pod in listed.items}
        except ApiError as err:
            untold.append(f"pods of the GPU Operator and of autoscalers ({err})")
        for namespace in sorted({"kube-system", settings.agent_namespace}):
            path = f"/api/v1/namespaces/{namespace}/configmaps"
            try:
                for each in api.list(path, _configurations, page_size=PAGE).items:
                    schedulers |= each
            except ApiError as err:
                untold.append(f"ConfigMaps of {namespace}, for kube-scheduler's ({err})")
    finally:
        api.close()
    return Environment(tuple(pods.values()), nodes, schedulers, untold)


def _api(kubeconfig: str | None, context: str | None) -> KubeApi:
    hint = "without one: headroom doctor --fleet FLEET.yaml"
    return KubeApi(load_configuration(kubeconfig, context, hint))


class _ConfigMap(KubeStruct, frozen=True):
    metadata: ObjectMeta
    data: Mapping[str, str] | None = None


_neighbour_decoder = msgspec.json.Decoder(Neighbour)
_config_map_decoder = msgspec.json.Decoder(_ConfigMap)


def _neighbour(raw: msgspec.Raw) -> Neighbour | None:
    try:
        return _neighbour_decoder.decode(raw)
    except (ValueError, RecursionError):
        return None  # of one that cannot be read nothing is said


def _configurations(raw: msgspec.Raw) -> dict[str, object] | None:
    """Where -> each KubeSchedulerConfiguration in a ConfigMap; what is no YAML is none."""
    try:
        found = _config_map_decoder.decode(raw)
    except (ValueError, RecursionError):
        return None
    of, held = found.metadata, dict[str, object]()
    for key, text in (found.data or {}).items():
        if KIND not in text:
            continue
        try:
            config = yaml.safe_load(text)
        except (ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(config, dict) and config.get("kind") == KIND:
            held[f"ConfigMap {of.namespace}/{of.name}, {key}"] = config
    return held


def _listed(api: KubeApi, kind: Kind) -> Relisted:
    for path in (kind.path, *kind.other_paths):
        try:
            listing: Listing[KubeObject] = api.list(path, partial(_read, kind), page_size=PAGE)
        except ApiStatus as err:
            if err.status == 404 and kind.other_paths:
                continue  # another version of it may be served, or none
            raise
        return Relisted(kind.type, tuple(listing.items), time.monotonic())
    return Relisted(kind.type, (), time.monotonic())


def _read(kind: Kind, raw: msgspec.Raw) -> KubeObject | None:
    """As the extender takes what it cannot read."""
    try:
        return kind.decode(raw)
    except (ValueError, RecursionError):
        try:
            identity = decode_identity(raw)
        except (ValueError, RecursionError):
            return None
        return kind.salvage(raw, identity)
