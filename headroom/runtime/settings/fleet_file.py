"""Reads fleet files, which describe the nodes of the embedded server and of experiments."""

import difflib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from headroom.contract.annotations import DEFAULT_VRAM, parse_vram
from headroom.contract.gpunode import (
    MAX_DEVICES,
    MAX_REPLICAS,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    Replicas,
)
from headroom.contract.gpunode_summary import summary_of
from headroom.contract.kube import Namespace, Node, NodeStatus, ObjectMeta
from headroom.contract.quantity import MAX_DEVICE_BYTES
from headroom.errors import BadSettings
from headroom.runtime.settings.constraints import QuantityBytes
from headroom.runtime.settings.settings_files import read_yaml

#: The default configuration of NVIDIA's device plugin and of the kubelet.
_PLUGIN = Plugin(
    allocation_policy="distributed", device_list_strategy="envvar", topology_manager_policy="none"
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FleetNodes(_Strict):
    """A group of ``count`` identical nodes."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=240)
    count: int = Field(1, ge=1, le=20_000)
    gpus: int = Field(ge=1, le=MAX_DEVICES)
    memory: QuantityBytes = Field(gt=0, le=MAX_DEVICE_BYTES)
    reserved: QuantityBytes = 0
    model: str = "GPU"
    sharing: Literal["none", "time-slicing", "mps"] = "none"
    replicas: int = Field(1, ge=1, le=MAX_REPLICAS)
    resource: str = "nvidia.com/gpu"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> "FleetNodes":
        if self.sharing == "none" and self.replicas != 1:
            raise ValueError(f"{self.replicas} replicas need sharing: time-slicing or mps")
        if self.sharing != "none" and self.replicas < 2:
            raise ValueError(f"sharing: {self.sharing} needs replicas: 2 or more")
        if self.reserved >= self.memory:
            raise ValueError("reserved must be less than memory")
        return self

    def names(self) -> Iterator[str]:
        if self.count == 1:
            yield self.name
        else:
            yield from (f"{self.name}-{i:04d}" for i in range(self.count))


class FleetNamespace(_Strict):
    name: str
    default_vram: str = Field(alias="defaultVram")

    @model_validator(mode="after")
    def _valid(self) -> "FleetNamespace":
        parse_vram(self.default_vram, DEFAULT_VRAM)
        return self


class Fleet(_Strict):
    nodes: list[FleetNodes] = Field(min_length=1)
    namespaces: list[FleetNamespace] = Field(default_factory=list)

    @model_validator(mode="after")
    def _distinct(self) -> "Fleet":
        names = [name for nodes in self.nodes for name in nodes.names()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"node {twice} is defined twice")
        return self

    def kube_nodes(self) -> Iterator[Node]:
        for nodes in self.nodes:
            for name in nodes.names():
                yield Node(
                    metadata=ObjectMeta(
                        name=name, uid=name, labels=nodes.labels, annotations=nodes.annotations
                    ),
                    status=NodeStatus(
                        allocatable={nodes.resource: str(nodes.gpus * nodes.replicas)}
                    ),
                )

    def kube_namespaces(self) -> Iterator[Namespace]:
        for namespace in self.namespaces:
            annotations = {DEFAULT_VRAM: namespace.default_vram}
            yield Namespace(metadata=ObjectMeta(name=namespace.name, annotations=annotations))

    def gpunodes(self, now: datetime) -> Iterator[GPUNode]:
        """Yield each node as its agent would report it, with all devices healthy and free."""
        stamp = now.astimezone(UTC).isoformat(timespec="milliseconds")
        for nodes in self.nodes:
            for name in nodes.names():
                devices = [_device(nodes, name, index) for index in range(nodes.gpus)]
                status = GPUNodeStatus(
                    observed_at=stamp,
                    devices=devices,
                    plugin=_PLUGIN,
                    summary=summary_of(devices),
                )
                yield GPUNode(
                    metadata=ObjectMeta(name=name, uid=name),
                    spec=GPUNodeSpec(initialised=True),
                    status=status,
                )


def _device(nodes: FleetNodes, node: str, index: int) -> Device:
    return Device(
        uuid=f"GPU-{node}-{index}",
        index=index,
        model=nodes.model,
        memory_bytes=nodes.memory,
        reserved_bytes=nodes.reserved,
        used_bytes=0,
        unattributed_bytes=0,
        sharing=nodes.sharing,
        resource=nodes.resource,
        replicas=Replicas(free=nodes.replicas),
    )


def _message(error: ErrorDetails) -> str:
    """Return one error of a fleet file, with the field that was probably meant."""
    where, message = ".".join(map(str, error["loc"])) or "file", error["msg"]
    if error["type"] == "extra_forbidden":
        kinds = (Fleet, FleetNodes, FleetNamespace)
        known = {name for kind in kinds for name in kind.model_fields}
        close = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        message = f"is not a field{f'; did you mean {close[0]}?' if close else ''}"
    return f"{where}: {message}"


def load_fleet(path: Path) -> Fleet:
    """Read and check a fleet file.

    Raises ``BadSettings``. The message names the invalid field and gives an example.
    """
    try:
        return Fleet(**read_yaml(path))
    except ValidationError as err:
        found = "; ".join(map(_message, err.errors()))
        raise BadSettings(
            f"{path}: {found}. Example: 'nodes: [{{name: gpu-a, gpus: 1, memory: 24Gi, "
            "sharing: time-slicing, replicas: 4}]'"
        ) from err
