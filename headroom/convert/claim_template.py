"""Builds and reads ResourceClaimTemplates for GPU memory."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headroom.contract.dra import DRIVER
from headroom.contract.errors import shortened
from headroom.contract.quantity import format_bytes
from headroom.convert.allocators import BadValue, count, quantity
from headroom.convert.pod_template import Yaml

#: The DeviceClass that NVIDIA's driver installs. It has the name of the driver.
DEVICE_CLASS = DRIVER
#: Attribute that differs between devices. A constraint on it forces a request to get different
#: devices.
_UUID = f"{DEVICE_CLASS}/uuid"
#: Suffix of the names of NVIDIA's DeviceClasses, such as mig.nvidia.com.
VENDOR = ".nvidia.com"
#: Field of a request that lists alternatives in the order of preference.
_ALTERNATIVES = "firstAvailable"
API_VERSION = "resource.k8s.io/v1"
KIND = "ResourceClaimTemplate"
MEMORY = "memory"
#: Maximum number of requests of one claim, as the API server validates it.
MAX_REQUESTS = 32


@dataclass(slots=True)
class Request:
    """One request of a claim: ``count`` devices with ``memory_bytes`` on each."""

    name: str
    count: int
    memory_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.count * self.memory_bytes


def template_with(name: str, namespace: str, requests: Collection[Request]) -> Yaml:
    """Return a ResourceClaimTemplate with these requests. An empty namespace is left out."""
    devices: dict[str, Any] = {
        "requests": [
            {
                "name": each.name,
                "exactly": {
                    "deviceClassName": DEVICE_CLASS,
                    "allocationMode": "ExactCount",
                    "count": each.count,
                    "capacity": {"requests": {MEMORY: format_bytes(each.memory_bytes)}},
                },
            }
            for each in requests
        ]
    }
    # Without this constraint, one device that several claims may share could be allocated twice.
    if several := [each.name for each in requests if each.count > 1]:
        devices["constraints"] = [
            {"requests": [name], "distinctAttribute": _UUID} for name in several
        ]
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    spec = {"spec": {"devices": devices}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def requests_of(name: str, claim: Yaml, templates: Mapping[str, Yaml]) -> list[Request]:
    """Return the requests of claim ``name`` of a pod, or none if it is for devices other than GPUs.

    Raises ``BadValue`` if Headroom cannot express them.
    """
    if shared := claim.get("resourceClaimName"):
        raise BadValue(
            f"claim {name} is ResourceClaim {shortened(str(shared))}, which pods can share; only "
            f"claims from a {KIND} are converted"
        )
    wanted = str(claim.get("resourceClaimTemplateName"))
    if wanted not in templates:
        raise BadValue(f"{KIND} {shortened(wanted)} of claim {name} is not in the file; add it")
    try:
        devices = templates[wanted]["spec"]["spec"]["devices"]
        # In v1beta1, the fields are in the request itself.
        found = [(str(each["name"]), each.get("exactly") or each) for each in devices["requests"]]
        classes = set(_classes(devices["requests"]))
        if not any(each.endswith(VENDOR) for each in classes):
            return []
        is_known = all(map(_is_expressible, devices.get("constraints") or ()))
        if classes != {DEVICE_CLASS} or not is_known or devices.get("config"):
            raise BadValue(
                f"claim {name} has a request for another class than {DEVICE_CLASS}, a constraint "
                "or a configuration, which Headroom cannot express"
            )
        if alternative := next((e["name"] for e in devices["requests"] if _ALTERNATIVES in e), ""):
            raise BadValue(
                f"request {alternative} of claim {name} has {_ALTERNATIVES}, which Headroom cannot "
                "express"
            )
        return [_read(f"request {each} of claim {name}", each, exact) for each, exact in found]
    except (KeyError, TypeError, AttributeError) as err:
        raise BadValue(f"{KIND} {shortened(wanted)} is not valid") from err


def _classes(requests: Iterable[Yaml]) -> Iterator[str]:
    """Yield the DeviceClasses of requests, and of their alternatives."""
    for request in requests:
        for each in request.get(_ALTERNATIVES) or (request.get("exactly") or request,):
            yield str(each.get("deviceClassName"))


def _is_expressible(constraint: Yaml) -> bool:
    """Return whether the constraint only forces the devices of one request to differ."""
    return (
        set(constraint) <= {"requests", "distinctAttribute"}
        and constraint.get("distinctAttribute") == _UUID
        and len(constraint.get("requests") or ()) == 1
    )


def _read(where: str, name: str, exact: Yaml) -> Request:
    known = {"name", "deviceClassName", "allocationMode", "count", "capacity"}
    more = sorted(set(map(str, exact)) - known)
    if exact.get("allocationMode", "ExactCount") != "ExactCount":
        more.append("allocationMode")
    if more:
        raise BadValue(f"{where} has {', '.join(more)}, which has no equivalent")
    amounts = (exact.get("capacity") or {}).get("requests") or {}
    text = amounts.get(MEMORY, amounts.get(f"{DEVICE_CLASS}/{MEMORY}"))
    if text is None or len(amounts) != 1:
        raise BadValue(f"{where} does not request {MEMORY} alone. Example: {MEMORY}: 8Gi")
    amount, devices = quantity(text), count(exact.get("count", 1))
    if amount is None:
        raise BadValue(f"{where} requests no {MEMORY}. Example: {MEMORY}: 8Gi")
    return Request(name, devices, amount.count_bytes)


class ClaimTemplates:
    """The ResourceClaimTemplates of a file, and the changes to them."""

    def __init__(self, documents: Iterable[Any]) -> None:
        #: Templates by namespace ("" if none is given), and then by name.
        self._templates: dict[str, dict[str, Yaml]] = {}
        for each in _objects(documents):
            if each.get("kind") == KIND and isinstance(each.get("metadata"), dict):
                self.of(_namespace(each))[str(each["metadata"].get("name"))] = each
        #: (namespace, name) of each template that a converted pod used.
        self._released: set[tuple[str, str]] = set()
        #: The templates that each workload needs, by the id of the workload's document.
        self._added: dict[int, list[Yaml]] = {}

    def of(self, namespace: str) -> dict[str, Yaml]:
        """Return the templates of a namespace by name."""
        return self._templates.setdefault(namespace, {})

    def add(self, template: Yaml, document: Any) -> None:
        """Put a template in front of the document that needs it."""
        self._added.setdefault(id(document), []).append(template)

    def release(self, namespace: str, names: Iterable[str]) -> None:
        """Record that a pod no longer uses these templates."""
        self._released.update((namespace, name) for name in names)

    def unused(self, documents: Iterable[Any]) -> list[tuple[str, Yaml]]:
        """Return the released templates that no pod uses any more, with their names."""
        in_use = {(ns, str(name)) for each in documents for ns, name in _references(each)}
        return [
            (name, self.of(namespace)[name])
            for namespace, name in sorted(self._released - in_use)
            if name in self.of(namespace)
        ]

    def placed(self, documents: Iterable[Any]) -> list[Any]:
        """Return the documents with the added templates, and without templates that no pod uses."""
        kept = [document for document in documents if document is not None]
        unused = {id(template) for _, template in self.unused(kept)}
        for each in kept:
            if isinstance(each.get("items"), list):
                each["items"] = [item for item in each["items"] if id(item) not in unused]
        return [
            part
            for each in kept
            if id(each) not in unused
            for part in (*self._added.get(id(each), ()), each)
        ]


def _objects(documents: Iterable[Any]) -> Iterator[Yaml]:
    """Yield the objects of the documents, including objects in lists."""
    for each in documents:
        if isinstance(each, dict):
            yield each
            items = each.get("items")
            yield from _objects(items if isinstance(items, list) else ())


def _namespace(of: Yaml) -> str:
    metadata = of.get("metadata")
    return str(metadata.get("namespace") or "") if isinstance(metadata, dict) else ""


def _references(node: Any, namespace: str = "") -> Iterator[tuple[str, object]]:
    """Yield namespace and name of each template that the tree refers to."""
    if isinstance(node, dict):
        namespace = _namespace(node) or namespace
        for key, value in node.items():
            if key == "resourceClaimTemplateName":
                yield namespace, value
            else:
                yield from _references(value, namespace)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value, namespace)
