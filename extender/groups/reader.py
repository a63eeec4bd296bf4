"""Reads from the API server which pods a group has and how many of them it needs."""

import asyncio
from urllib.parse import quote

import msgspec

from extender.ledger.kube_store import store_error
from headroom.contract.kube import KubeStruct, Pod
from headroom.core.groups.membership import POD_GROUP, Group, GroupKind, group_of
from headroom.core.groups.partial import Members
from headroom.errors import OutcomeUnknown
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import KubeApi

#: Versions of the PodGroup API, the newest first. Kubernetes 1.36 has v1alpha2, and Kubernetes 1.37
#: and later have v1beta1.
_VERSIONS = {
    GroupKind.KUBERNETES: [
        f"scheduling.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha3", "v1alpha2")
    ],
    GroupKind.COSCHEDULING: ["scheduling.x-k8s.io/v1alpha1"],
}
_PAGE_SIZE = 500


class _Gang(KubeStruct, frozen=True):
    min_count: int | None = None


class _Policy(KubeStruct, frozen=True):
    gang: _Gang = _Gang()


class _Spec(KubeStruct, frozen=True):
    #: The policy of the group. Only groups of kube-scheduler's own API set it.
    scheduling_policy: _Policy = _Policy()
    #: Minimum number of pods. Only groups of the Coscheduling plugin set it.
    min_member: int | None = None


class _PodGroup(KubeStruct, frozen=True):
    spec: _Spec = _Spec()


_decode_group = msgspec.json.Decoder(_PodGroup).decode
_decode_pod = msgspec.json.Decoder(Pod).decode


class KubeGroups:
    """Reads groups of pods in threads. Raises store errors."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def read(self, group: Group) -> Members:
        what = f"read group {group.namespace}/{group.name}"
        try:
            return await asyncio.to_thread(self._read, group)
        except ApiError as err:
            raise store_error(what, err) from err
        except msgspec.MsgspecError as err:
            raise OutcomeUnknown(f"{what}: the answer cannot be read: {err}") from err

    def _read(self, group: Group) -> Members:
        minimum = self._minimum(group)
        if minimum is None:
            return Members(None, ())
        of_plugin = group.kind is GroupKind.COSCHEDULING
        listed = self._api.list(
            f"/api/v1/namespaces/{quote(group.namespace, safe='')}/pods",
            _decode_pod,
            page_size=_PAGE_SIZE,
            query={"labelSelector": f"{POD_GROUP}={group.name}"} if of_plugin else {},
        )
        return Members(minimum, [pod for pod in listed.items if group_of(pod) == group])

    def _minimum(self, group: Group) -> int | None:
        namespace, name = quote(group.namespace, safe=""), quote(group.name, safe="")
        for version in _VERSIONS.get(group.kind, ()):
            path = f"/apis/{version}/namespaces/{namespace}/podgroups/{name}"
            try:
                spec = _decode_group(self._api.call("GET", path)).spec
            except ApiStatus as err:
                if err.status != 404:  # not found: the API version or the object
                    raise
                continue
            of_plugin = group.kind is GroupKind.COSCHEDULING
            return spec.min_member if of_plugin else spec.scheduling_policy.gang.min_count
        return None
