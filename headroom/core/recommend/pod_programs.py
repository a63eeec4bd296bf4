"""The programs of a pod's containers, decoded from the pod's JSON."""

from typing import Any

import msgspec

from headroom.contract.kube import KubeStruct
from headroom.core.recommend.programs import Program, program

#: Prefixes of variables that Headroom's webhook adds. Their values depend on the request.
_ADDED = ("HEADROOM_", "NVIDIA_", "CUDA_MPS_")


class _Variable(KubeStruct, frozen=True):
    name: str = ""
    value: str | None = None
    value_from: Any = None


class _Container(KubeStruct, frozen=True):
    name: str = ""
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[_Variable] | None = None


class _Metadata(KubeStruct, frozen=True):
    generate_name: str = ""


class _Spec(KubeStruct, frozen=True):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None


class _Pod(KubeStruct, frozen=True):
    metadata: _Metadata = _Metadata()
    spec: _Spec = _Spec()


_decode = msgspec.json.Decoder(_Pod).decode
_encode = msgspec.json.encode


def programs_of(raw: bytes | msgspec.Raw) -> tuple[dict[str, Program], str]:
    """Return the program of each container, and the pod's generateName. Raises ``ValueError``."""
    pod = _decode(raw)
    containers = [*(pod.spec.init_containers or ()), *(pod.spec.containers or ())]
    return {each.name: _program(each) for each in containers}, pod.metadata.generate_name


def _program(container: _Container) -> Program:
    environment = {
        each.name: each.value or _encode(each.value_from).decode()
        for each in container.env or ()
        if not each.name.startswith(_ADDED)
    }
    return program(container.image, container.command or (), container.args or (), environment)
