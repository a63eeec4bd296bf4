"""What the other replicas know: kube-scheduler's calls may go to any of them.

A peer is asked what it knows itself (``peers=false``), so that nobody asks in circles, and with the
caller's own credentials.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Header, Query
from pydantic import BaseModel, ValidationError

from extender.web.decisions import Unanswered

#: Says which replica an answer is from.
REPLICA = "Headroom-Replica"
M = TypeVar("M", bound=BaseModel)

AskedPeers = Annotated[
    bool,
    Query(
        alias="peers",
        description="false: what this replica knows itself, without asking its peers.",
        examples=["false"],
    ),
]
#: The caller's credentials, which its questions to peers carry too.
Credentials = Annotated[str | None, Header(alias="Authorization", include_in_schema=False)]


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """``body`` is empty where the peer knows nothing of it (404); None where it did not answer,
    and then ``trouble`` says why."""

    peer: str
    body: bytes | None
    trouble: str = ""


#: Asks every peer for this path, which may go on with a query, with these credentials; blocks, but
#: only for a moment.
AskPeers = Callable[[str, str | None], Sequence[PeerAnswer]]


def nobody(path: str, authorization: str | None) -> Sequence[PeerAnswer]:
    """Of a replica that is alone."""
    return ()


def read(answers: Sequence[PeerAnswer], form: type[M]) -> tuple[list[M], list[Unanswered]]:
    """What the peers said in this form, and who said nothing that can be read."""
    bodies: list[M] = []
    unanswered: list[Unanswered] = []
    for answer in answers:
        if answer.body is None:
            unanswered.append(Unanswered(peer=answer.peer, message=answer.trouble))
        elif answer.body:
            try:
                bodies.append(form.model_validate_json(answer.body))
            except ValidationError:
                message = "its answer is not understood: is it of another version?"
                unanswered.append(Unanswered(peer=answer.peer, message=message))
    return bodies, unanswered
