"""The preemption attempt, an annotation that a replica writes to the pod that needs a node.

A pod has at most one attempt. A replica writes the attempt before it evicts a victim, on condition
that the pod's resourceVersion is unchanged. So only one replica evicts victims for a pod, and all
replicas see which node is held for it.
"""

import msgspec

from headroom.contract.annotations import PREEMPTING
from headroom.contract.kube import Pod


class Attempt(msgspec.Struct, frozen=True):
    #: The id of the attempt, which differs from the ids of earlier attempts for the same pod.
    id: str = ""
    node: str = ""
    #: Start of the attempt in seconds of Unix time.
    since: int = 0
    #: Uids of the pods to evict.
    victims: tuple[str, ...] = ()


_decode = msgspec.json.Decoder(Attempt).decode
_encode = msgspec.json.Encoder().encode


def encode_attempt(attempt: Attempt) -> str:
    return _encode(attempt).decode()


def attempt_of(pod: Pod) -> Attempt | None:
    """Return the pod's last attempt, or None if there is none or it cannot be decoded.

    Decoding can fail, because users can write any text into the annotation.
    """
    text = pod.annotation(PREEMPTING)
    if text is None:
        return None
    try:
        return _decode(text)
    except (ValueError, RecursionError):
        return None
