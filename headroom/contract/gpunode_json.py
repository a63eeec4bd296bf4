"""Decodes GPUNodes from JSON, and encodes them."""

from operator import is_
from typing import Any, TypeVar

import msgspec

from headroom.contract.errors import BadReport
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import KubeStruct, ObjectMeta
from headroom.contract.printable import plain

T = TypeVar("T")

_decoder = msgspec.json.Decoder(GPUNode)
_encoder = msgspec.json.Encoder()


def decode_gpunode(body: bytes | msgspec.Raw) -> GPUNode:
    """Decode a GPUNode. Raises ``BadReport``, which names the field that cannot be decoded."""
    try:
        return _decoder.decode(body)
    except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
        raise BadReport(f"GPUNode cannot be read: {err}") from err


def encode_gpunode(node: GPUNode) -> bytes:
    return _encoder.encode(node)


class _Reservations(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: GPUNodeSpec = GPUNodeSpec()


_reservations_decoder = msgspec.json.Decoder(_Reservations)


def decode_reservations(body: bytes | msgspec.Raw) -> GPUNode:
    """Decode a GPUNode without its status, so that a malformed status does not hide the ledger.

    Raises ``BadReport`` if the spec or the metadata cannot be decoded either.
    """
    try:
        decoded = _reservations_decoder.decode(body)
    except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
        raise BadReport(f"GPUNode cannot be read: {err}") from err
    return GPUNode(metadata=decoded.metadata, spec=decoded.spec)


def plain_object(part: T) -> T:
    """Return the object with all texts made plain, including texts in lists and structs. If they
    are already plain, return the object itself.

    The values of maps are converted, but not their keys.
    """
    whole: Any = part
    if isinstance(whole, str):
        return plain(whole)  # type: ignore[return-value]
    if isinstance(whole, list):
        clean = [plain_object(each) for each in whole]
        return part if all(map(is_, clean, whole)) else clean  # type: ignore[return-value]
    if isinstance(whole, dict):
        values = {key: plain_object(value) for key, value in whole.items()}
        return part if all(map(is_, values.values(), whole.values())) else values  # type: ignore[return-value]
    if isinstance(whole, msgspec.Struct):
        fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
        changes = {
            name: clean
            for name, value in fields.items()
            if (clean := plain_object(value)) is not value
        }
        return msgspec.structs.replace(whole, **changes) if changes else part  # type: ignore[return-value]
    return part
