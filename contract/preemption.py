"""What we write on a pod for which we evict others: the attempt, of which there is one at a time.

It is written before anybody is evicted, on condition that the pod is as it was read, so that of any
number of replicas one alone acts; and every replica reads from it for whom a place is held.
"""

import msgspec

from contract.annotations import PREEMPTING
from contract.kube import Pod


class Attempt(msgspec.Struct, frozen=True):
    #: Tells one attempt from the next.
    id: str = ""
    node: str = ""
    #: Unix time, seconds.
    since: int = 0
    #: Uids of those who are evicted.
    victims: tuple[str, ...] = ()


_decode = msgspec.json.Decoder(Attempt).decode
_encode = msgspec.json.Encoder().encode


def encode_attempt(attempt: Attempt) -> str:
    return _encode(attempt).decode()


def attempt_of(pod: Pod) -> Attempt | None:
    """The last one; None where there is none. Raises nothing: users can write anything there."""
    text = pod.annotation(PREEMPTING)
    if text is None:
        return None
    try:
        return _decode(text)
    except (ValueError, RecursionError):
        return None
