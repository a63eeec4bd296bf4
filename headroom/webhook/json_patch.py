"""Builds a JSON patch of a pod or a template step by step.

Each step sees the changes of the earlier steps.

Only some of the pod's fields are decoded, so the patch adds to fields and never replaces an object.
A list that is absent, null or empty is created, because the API server may send any of these forms.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headroom.contract.kube import (
    Container,
    EnvVar,
    EnvVarSource,
    FieldRef,
    InitContainer,
    Pod,
    ResourceRequirements,
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a JSON patch."""

    #: The operation, which is add or remove.
    op: str
    path: str
    #: The value to add. Only the operation add has a value.
    value: Any = None

    @property
    def wire(self) -> dict[str, Any]:
        """The operation in the format of RFC 6902."""
        wire = {"op": self.op, "path": self.path}
        return {**wire, "value": self.value} if self.op == "add" else wire


@dataclass(frozen=True, slots=True)
class Where:
    """The position of a container in a pod, given by its list and its index in the list."""

    init: bool
    index: int

    @property
    def path(self) -> str:
        return f"/spec/{'initContainers' if self.init else 'containers'}/{self.index}"


@dataclass(slots=True)
class Draft:
    """A patch in progress. ``pod`` is the pod after all operations so far."""

    pod: Pod
    operations: list[Operation] = field(default_factory=list)
    #: Path of the pod in the patched object. For a workload, it is the path of the template.
    root: str = ""

    def annotate(self, key: str, text: str) -> None:
        """Set an annotation that is missing or has another value."""
        before = dict(self.pod.metadata.annotations or {})
        if before:
            self._do("add", f"/metadata/annotations/{_escaped(key)}", text)
        else:
            self._do("add", "/metadata/annotations", {key: text})
        self._annotated({**before, key: text})

    def unannotate(self, keys: Collection[str]) -> None:
        """Remove annotations. The pod must have them."""
        for key in keys:
            self._do("remove", f"/metadata/annotations/{_escaped(key)}")
        before = self.pod.metadata.annotations or {}
        # If the mapping becomes empty, ``annotate`` replaces it.
        self._annotated({key: text for key, text in before.items() if key not in keys})

    def schedule(self, scheduler: str) -> None:
        self._do("add", "/spec/schedulerName", scheduler)
        self._set_spec(scheduler_name=scheduler)

    def variable(self, where: Where, variable: EnvVar) -> None:
        """Add an environment variable that the container does not have."""
        container = self.container(where)
        plain = _variable(variable)
        if container.env:
            self._do("add", f"{where.path}/env/-", plain)
        else:
            self._do("add", f"{where.path}/env", [plain])
        env = [*(container.env or ()), variable]
        self._put(where, msgspec.structs.replace(container, env=env))

    def limit(self, where: Where, resource: str, quantity: str) -> None:
        """Request an extended resource, with the limit equal to the request."""
        container = self.container(where)
        resources = container.resources or ResourceRequirements()
        limits, requests = dict(resources.limits or {}), dict(resources.requests or {})
        if container.resources is None:
            self._do("add", f"{where.path}/resources", {})
        for name, held in (("limits", limits), ("requests", requests)):
            if held:
                self._do("add", f"{where.path}/resources/{name}/{_escaped(resource)}", quantity)
            else:
                self._do("add", f"{where.path}/resources/{name}", {resource: quantity})
            held[resource] = quantity
        asked = ResourceRequirements(limits=limits, requests=requests)
        self._put(where, msgspec.structs.replace(container, resources=asked))

    def first(self, gate: Mapping[str, Any]) -> None:
        """Insert an init container before all others.

        This shifts the indices of the init containers, so steps that use indices must come earlier.
        """
        init = self.pod.spec.init_containers or []
        if init:
            self._do("add", "/spec/initContainers/0", gate)
        else:
            self._do("add", "/spec/initContainers", [gate])
        self._set_spec(init_containers=[msgspec.convert(gate, InitContainer), *init])

    def replace_first(self, index: int, gate: Mapping[str, Any]) -> None:
        """Remove the init container at ``index`` and insert ``gate`` before all others."""
        self._do("remove", f"/spec/initContainers/{index}")
        self._do("add", "/spec/initContainers/0", gate)
        init = [*(self.pod.spec.init_containers or ())]
        del init[index]
        self._set_spec(init_containers=[msgspec.convert(gate, InitContainer), *init])

    def container(self, where: Where) -> Container:
        spec = self.pod.spec
        found = (spec.init_containers if where.init else spec.containers) or []
        return found[where.index]

    def _do(self, op: str, path: str, value: Any = None) -> None:
        self.operations.append(Operation(op, f"{self.root}{path}", value))

    def _annotated(self, annotations: dict[str, str]) -> None:
        metadata = msgspec.structs.replace(self.pod.metadata, annotations=annotations)
        self.pod = msgspec.structs.replace(self.pod, metadata=metadata)

    def _put(self, where: Where, container: Container) -> None:
        name = "init_containers" if where.init else "containers"
        containers = [*(getattr(self.pod.spec, name) or ())]
        containers[where.index] = container
        self._set_spec(**{name: containers})

    def _set_spec(self, **fields: Any) -> None:
        spec = msgspec.structs.replace(self.pod.spec, **fields)
        self.pod = msgspec.structs.replace(self.pod, spec=spec)


def following(name: str, annotation: str) -> EnvVar:
    """Return a variable with the value that an annotation has when the container starts."""
    path = f"metadata.annotations['{annotation}']"
    return EnvVar(name=name, value_from=EnvVarSource(field_ref=FieldRef(field_path=path)))


def _variable(variable: EnvVar) -> dict[str, Any]:
    if variable.value_from is None or variable.value_from.field_ref is None:
        return {"name": variable.name, "value": variable.value or ""}
    # Set the API server's default for apiVersion, so that the API server changes nothing later.
    reference = {"apiVersion": "v1", "fieldPath": variable.value_from.field_ref.field_path}
    return {"name": variable.name, "valueFrom": {"fieldRef": reference}}


def _escaped(key: str) -> str:
    """Escape a key for use in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
