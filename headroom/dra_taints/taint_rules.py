"""Lists, creates and deletes Headroom's DeviceTaintRules, in the newest version that the API server
serves."""

import hashlib
from collections.abc import Iterator
from urllib.parse import quote

import msgspec

from headroom.contract.dra import (
    DRIVER,
    MANAGED_BY,
    MANAGER,
    NO_SCHEDULE,
    DeviceSelector,
    DeviceTaint,
    DeviceTaintRule,
    DeviceTaintRuleSpec,
)
from headroom.contract.keys import RULE_DEVICE, RULE_NODE, TAINT_KEY
from headroom.contract.kube import KubeStruct, ObjectMeta, OwnerReference
from headroom.core.cluster.claimed_devices import DraDevice
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import METADATA_ONLY, KubeApi

#: The versions of the API, newest first. Kubernetes serves v1 by default from 1.37. It has v1alpha3
#: from 1.33 and v1beta2 from 1.36, but an administrator must enable these versions.
VERSIONS = ("v1", "v1beta2", "v1alpha3")
NOT_SERVED = (
    "The API server serves no DeviceTaintRules. Enable feature gate DRADeviceTaintRules. Before "
    "Kubernetes 1.37, also enable API resource.k8s.io/v1beta2 (1.36) or v1alpha3 (1.33 to 1.35)"
)
#: Owner of the rules: the ValidatingAdmissionPolicy that limits what the controller may write. When
#: it is uninstalled, Kubernetes deletes the rules.
OWNER = "headroom-device-taints"


class _Resource(KubeStruct, frozen=True):
    name: str = ""


class _Resources(KubeStruct, frozen=True):
    resources: list[_Resource] | None = None


class _Partial(KubeStruct, frozen=True):
    metadata: ObjectMeta


_decode_resources = msgspec.json.Decoder(_Resources).decode
_decode_rule = msgspec.json.Decoder(DeviceTaintRule).decode
_decode_partial = msgspec.json.Decoder(_Partial).decode
_encode = msgspec.json.Encoder().encode


class TaintRules:
    """The rules with Headroom's label. Its methods block, and raise ``ApiError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        #: The served version; empty if it is unknown or there is none.
        self.version = ""
        self._owner: OwnerReference | None = None

    def discover(self) -> bool:
        """Find the served version. Return whether there is one."""
        self.version = next(self._served(), "")
        return bool(self.version)

    def list(self) -> dict[DraDevice, DeviceTaintRule]:
        """Return the rules by device. Delete rules that do not select exactly one device."""
        found: dict[DraDevice, DeviceTaintRule] = {}
        listed = self._api.list(
            self._path(),
            _decode_rule,
            page_size=500,
            query={"labelSelector": f"{MANAGED_BY}={MANAGER}"},
        )
        for rule in listed.items:
            selector = rule.spec.device_selector or DeviceSelector()
            device = DraDevice(selector.pool or "", selector.device or "")
            if rule.metadata.name != _name(device) or rule.spec != _spec(device):
                self.delete(rule)
            else:
                found[device] = rule
        return found

    def create(self, device: DraDevice, node: str, uuid: str) -> DeviceTaintRule:
        """Taint a device, so that no more claims get it."""
        rule = DeviceTaintRule(
            api_version=f"resource.k8s.io/{self.version}",
            metadata=ObjectMeta(
                name=_name(device),
                labels={MANAGED_BY: MANAGER},
                annotations={RULE_NODE: node, RULE_DEVICE: uuid},
                owner_references=[owner] if (owner := self._owned_by()) else None,
            ),
            spec=_spec(device),
        )
        return _decode_rule(self._api.call("POST", self._path(), body=_encode(rule)))

    def delete(self, rule: DeviceTaintRule) -> None:
        """Delete this rule. Do nothing if it is gone.

        Raise ``ApiStatus`` with 409 if another rule with its name has replaced it.
        """
        preconditions = {"preconditions": {"uid": rule.metadata.uid}}
        path = f"{self._path()}/{quote(rule.metadata.name, safe='')}"
        try:
            self._api.call("DELETE", path, body=_encode(preconditions))
        except ApiStatus as err:
            if err.status != 404:
                raise

    def _served(self) -> Iterator[str]:
        for version in VERSIONS:
            try:
                body = self._api.call("GET", f"/apis/resource.k8s.io/{version}")
            except ApiStatus as err:
                if err.status != 404:
                    raise
                continue
            resources = _decode_resources(body).resources or ()
            if any(each.name == "devicetaintrules" for each in resources):
                yield version

    def _owned_by(self) -> OwnerReference | None:
        """Return the owner of new rules, or None if it cannot be read."""
        if self._owner is None:
            try:
                folder = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
                body = self._api.call("GET", f"{folder}/{OWNER}", accept=METADATA_ONLY)
            except ApiError:
                return None
            self._owner = OwnerReference(
                api_version="admissionregistration.k8s.io/v1",
                kind="ValidatingAdmissionPolicy",
                name=OWNER,
                uid=_decode_partial(body).metadata.uid,
            )
        return self._owner

    def _path(self) -> str:
        return f"/apis/resource.k8s.io/{self.version}/devicetaintrules"


def _name(device: DraDevice) -> str:
    digest = hashlib.sha256(f"{device.pool}/{device.name}".encode()).hexdigest()
    return f"headroom-{digest[:16]}"


def _spec(device: DraDevice) -> DeviceTaintRuleSpec:
    return DeviceTaintRuleSpec(
        device_selector=DeviceSelector(driver=DRIVER, pool=device.pool, device=device.name),
        # Only NoSchedule is used, because a taint must never end a running pod.
        taint=DeviceTaint(key=TAINT_KEY, value="true", effect=NO_SCHEDULE),
    )
