"""A cluster listed once, through the kubeconfig or the pod's own account, as events."""

import time
from functools import partial

import msgspec
from kubernetes.config import ConfigException

from extender.cluster.events import Relisted
from extender.errors import BadSettings, NotSynced
from extender.kubeapi import ApiError, ApiStatus, KubeApi, Listing, load_configuration
from extender.settings import Settings
from extender.sources.kinds import Kind, KubeObject, decode_identity, watched_kinds

PAGE = 500


def list_cluster(
    settings: Settings, kubeconfig: str | None = None, context: str | None = None
) -> list[Relisted]:
    """All that an extender watches, as it is now.

    Raises ``BadSettings`` where no cluster is configured, ``NotSynced`` where it does not tell.
    """
    try:
        api = KubeApi(load_configuration(kubeconfig, context))
    except ConfigException as err:
        raise BadSettings(
            f"no cluster is configured: {err}; without one: headroom doctor --fleet FLEET.yaml"
        ) from err
    try:
        kinds = watched_kinds(settings.agent_namespace)
        return [_listed(api, kind) for kind in kinds]
    except ApiError as err:
        raise NotSynced(
            f"the cluster cannot be looked at: {err}; right is a kubeconfig that may list nodes, "
            "namespaces, pods, leases, resourceslices and gpunodes.headroom.gpu"
        ) from err
    finally:
        api.close()


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
