"""The heartbeat in an agent's Lease. With it, a newer sample confirms the last written status.

The agent writes no status while nothing changes. Its Lease contains the time of the newest sample
in ``headroom.gpu/observed-at``, and names the one status that the sample confirms. So a Lease never
confirms a status that the agent has not seen.

The extender does not depend on the node's clock, because ``after`` names a version of the Lease
that the agent had read before it took the sample. So everything that happened before this version
was written happened before the sample.
"""

import msgspec

from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.kube import KubeStruct, Lease


class Confirmation(KubeStruct, frozen=True):
    """Confirms that a sample equals a status, apart from SM activity."""

    #: When the sample was taken, by the node's clock (RFC 3339).
    sampled_at: str
    #: The uid of the GPUNode whose status is confirmed, and the ``observedAt`` of this status.
    gpunode: str
    observed_at: str
    #: resourceVersion of this Lease that the agent read before the sample. Empty if it read none.
    after: str = ""


_decoder = msgspec.json.Decoder(Confirmation)


def encode_confirmation(confirmation: Confirmation) -> str:
    """Return the value of the annotation."""
    return msgspec.json.encode(confirmation).decode()


def confirmation_of(lease: Lease) -> Confirmation | None:
    """Return the confirmation in the Lease, or None if there is none or it cannot be decoded."""
    text = (lease.metadata.annotations or {}).get(OBSERVED_AT)
    if text is None:
        return None
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        return None
