"""Reads GPUNodes from JSON, and writes them."""

import msgspec

from contract.errors import BadReport
from contract.gpunode import GPUNode, GPUNodeSpec
from contract.kube import KubeStruct, ObjectMeta

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
