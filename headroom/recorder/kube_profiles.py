"""Reads the owners of pods, and reads and writes VRAMProfiles."""

from urllib.parse import quote

import msgspec
import structlog

from headroom.bounded_dict import Bounded
from headroom.contract.errors import BadReport
from headroom.contract.gpunode import GROUP, VERSION
from headroom.contract.kube import KubeStruct, ObjectMeta, OwnerReference
from headroom.contract.vramprofile import PROFILE_PLURAL, ProfileOwner, VRAMProfile, decode_profile
from headroom.recorder.owners import (
    MAX_CHAIN,
    Controller,
    group,
    owner_of,
    resource_of,
)
from headroom.recorder.pod_facts import PodFacts
from headroom.runtime.kube.api_errors import ApiStatus, Unreadable
from headroom.runtime.kube.client import METADATA_ONLY, KubeApi

log = structlog.get_logger()

#: Maximum number of controllers for which the end of the chain of controllers is cached.
MAX_KNOWN = 20_000
_NOT_READABLE = (403, 404)


class _Metadata(ObjectMeta, frozen=True):
    generate_name: str = ""


class _Partial(KubeStruct, frozen=True):
    """A PartialObjectMetadata."""

    metadata: _Metadata


_decode = msgspec.json.Decoder(_Partial).decode
_encode = msgspec.json.Encoder().encode


class OwnerReader:
    """Follows the chain of a pod's controllers to its end, and caches the end. The methods
    block."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        #: The end of each controller's chain and the reference to it, by the controller's namespace
        #: and uid. The namespace is part of the key, because a user can write the uid of a
        #: controller in another namespace into a pod.
        self._ends: Bounded[tuple[str, str], tuple[Controller, OwnerReference]] = Bounded(MAX_KNOWN)

    def owner(self, pod: PodFacts) -> tuple[ProfileOwner, OwnerReference | None]:
        """Return the owner of a pod and a reference to it. The reference is None for a family of
        owners.

        Raise ``ApiError`` if the chain cannot be read now.
        """
        if pod.controller is None:
            return owner_of(pod, None), None
        key = (pod.namespace, pod.controller.uid)
        known = self._ends.get(key)
        if known is None:
            known = self._ends[key] = self._end(pod.namespace, pod.controller)
        end, reference = known
        owner = owner_of(pod, end)
        return owner, None if owner.family else reference

    def _end(self, namespace: str, first: OwnerReference) -> tuple[Controller, OwnerReference]:
        reference, generate_name = first, ""
        for _ in range(MAX_CHAIN):
            resource = resource_of(reference)
            found = resource and self._read(namespace, reference, resource)
            if not found:
                break
            generate_name = found.generate_name
            if found.controller is None:
                break
            reference, generate_name = found.controller, ""
        end = Controller(
            reference.api_version, reference.kind, reference.name, generate_name, reference.uid
        )
        return end, OwnerReference(
            api_version=reference.api_version,
            kind=reference.kind,
            name=reference.name,
            uid=reference.uid,
        )

    def _read(self, namespace: str, controller: OwnerReference, resource: str) -> _Metadata | None:
        """Return the metadata of a controller, or None if it is gone or may not be read."""
        # The user who creates a pod chooses these values, so they must not be able to change the
        # path.
        api_group, version = (
            group(controller.api_version),
            controller.api_version.rpartition("/")[2],
        )
        parts = (api_group, version, "namespaces", namespace, resource, controller.name)
        path = "/apis/" + "/".join(quote(part, safe="") for part in parts)
        try:
            body = self._api.call("GET", path, accept=METADATA_ONLY)
        except ApiStatus as err:
            if err.status in _NOT_READABLE:
                return None
            raise
        try:
            metadata = _decode(body).metadata
        except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
            raise Unreadable(f"GET {path}: {err}") from err
        return metadata if metadata.uid == controller.uid else None


class ProfileStore:
    """Lists, creates, replaces and deletes VRAMProfiles. The methods block and raise
    ``ApiError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def list(self) -> list[VRAMProfile]:
        """Return all profiles that can be decoded."""
        path = f"/apis/{GROUP}/{VERSION}/{PROFILE_PLURAL}"
        return self._api.list(path, _readable, page_size=500).items

    def write(self, profile: VRAMProfile) -> VRAMProfile:
        """Create the profile if it has no resourceVersion. Otherwise replace it if its
        resourceVersion is unchanged.

        Raise ``ApiStatus`` with 409 if another process created or changed it.
        """
        metadata = profile.metadata
        if metadata.resource_version:
            body = self._api.call("PUT", self._path(metadata), body=_encode(profile))
        else:
            body = self._api.call("POST", self._folder(metadata), body=_encode(profile))
        return _decode_profile(body)

    def read(self, namespace: str, name: str) -> VRAMProfile | None:
        """Return the profile, or None if it does not exist."""
        try:
            return _decode_profile(
                self._api.call("GET", self._path(ObjectMeta(namespace=namespace, name=name)))
            )
        except ApiStatus as err:
            if err.status == 404:
                return None
            raise

    def delete(self, profile: VRAMProfile) -> None:
        """Delete this version of a profile. Nothing happens if it does not exist.

        Raise ``ApiStatus`` with 409 if the profile has changed or another profile has replaced it.
        """
        metadata = profile.metadata
        preconditions = {"uid": metadata.uid, "resourceVersion": metadata.resource_version}
        try:
            self._api.call(
                "DELETE", self._path(metadata), body=_encode({"preconditions": preconditions})
            )
        except ApiStatus as err:
            if err.status != 404:
                raise

    def _folder(self, metadata: ObjectMeta) -> str:
        namespace = quote(metadata.namespace, safe="")
        return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PROFILE_PLURAL}"

    def _path(self, metadata: ObjectMeta) -> str:
        return f"{self._folder(metadata)}/{quote(metadata.name, safe='')}"


def _decode_profile(body: bytes) -> VRAMProfile:
    try:
        return decode_profile(body)
    except BadReport as err:
        raise Unreadable(str(err)) from err


def _readable(raw: msgspec.Raw) -> VRAMProfile | None:
    try:
        return decode_profile(raw)
    except BadReport as err:
        log.error("profile_unreadable", error=str(err))
        return None
