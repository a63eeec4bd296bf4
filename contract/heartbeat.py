"""What an agent's Lease says of its report: that a newer sample still shows the same.

A steady node writes no status. Its heartbeats carry when the newest sample was taken, under
``headroom.gpu/observed-at``, and name the one status that it confirms, so that a Lease never
vouches for a report it has not seen. Nobody has to trust the node's clock for that: ``after`` names
a version of the Lease that the agent knew of before it took the sample, hence whatever happened
before that version was written happened before the sample.
"""

import msgspec

from contract.annotations import OBSERVED_AT
from contract.kube import KubeStruct, Lease


class Vouch(KubeStruct, frozen=True):
    """A sample says the same as a status, in all but SM activity."""

    #: RFC 3339, by the node's clock, when the sample was taken.
    sampled_at: str
    #: The uid of the GPUNode whose status it confirms, and that status's own ``observedAt``.
    gpunode: str
    observed_at: str
    #: resourceVersion of this Lease as the agent knew it before the sample; empty: of none.
    after: str = ""


_decoder = msgspec.json.Decoder(Vouch)


def encode_vouch(vouch: Vouch) -> str:
    """The value of the annotation."""
    return msgspec.json.encode(vouch).decode()


def vouch_of(lease: Lease) -> Vouch | None:
    """What the Lease vouches for; None where that is nothing, or cannot be read."""
    text = (lease.metadata.annotations or {}).get(OBSERVED_AT)
    if text is None:
        return None
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        return None
