"""Decodes versions of GPUNodes, and reuses unchanged specs.

Most versions bring a new report and the same reservations. Those get the same spec object while it
is in use, so that later code can compare identities.
"""

from hashlib import blake2b
from weakref import WeakValueDictionary

import msgspec

from contract.gpunode import GPUNode, GPUNodeSpec, GPUNodeStatus, decode_gpunode
from contract.kube import KubeStruct, ObjectMeta
from extender.kube.interning import share_report, share_reservations


class _Halves(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"null")


_halves_decoder = msgspec.json.Decoder(_Halves)
_spec_decoder = msgspec.json.Decoder(GPUNodeSpec)
_status_decoder = msgspec.json.Decoder(GPUNodeStatus | None)


class GPUNodeReader:
    """Decodes GPUNodes; for one thread."""

    def __init__(self) -> None:
        #: Digest of a spec's JSON -> the spec.
        self._specs = WeakValueDictionary[bytes, GPUNodeSpec]()

    def read(self, body: bytes | msgspec.Raw) -> GPUNode:
        """Return the same as ``decode_gpunode``; raise the same errors."""
        try:
            halves = _halves_decoder.decode(body)
            written = blake2b(halves.spec, digest_size=16).digest()
            spec = self._specs.get(written)
            if spec is None:
                spec = self._specs[written] = _spec_decoder.decode(halves.spec)
                share_reservations(spec)
            status = _status_decoder.decode(halves.status)
        except (ValueError, RecursionError):
            return decode_gpunode(body)  # raises an error that names the field
        if status is not None:
            share_report(status)
        return GPUNode(metadata=halves.metadata, spec=spec, status=status)

    @property
    def known(self) -> int:
        """Return the number of specs in use."""
        return len(self._specs)
