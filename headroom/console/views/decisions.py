"""The decisions about pods, merged over all replicas."""

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Query
from starlette.responses import Response

from headroom.console.responses import UNKNOWN, AskedPage, InNamespace, encoded, listed, stamp
from headroom.console.view_context import Context, InContext, Newest, Visible
from headroom.console.views.decision_bodies import (
    DecisionBody,
    DecisionsBody,
    DecisionView,
    Rejects,
    Unanswered,
    WouldRejectView,
    decision_view,
    joined_by_pod,
    merged,
    position,
    would_reject,
)
from headroom.contract.reasons import Reason
from headroom.core.journal.decision_records import Record
from headroom.core.journal.journal import Journal
from headroom.runtime.server.auth import Sees, everything

USUAL_PAGE = 100
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

AskedPod = Annotated[
    str | None,
    Query(
        pattern="^[^/]+/[^/]+$",
        description="Only decisions about pods with this namespace and name.",
        examples=["default/trainer-0"],
    ),
]
AskedUid = Annotated[
    str | None,
    Query(
        description="Only decisions about the pod with this uid.",
        examples=["3f2b7c1e-5f0a-4bbb-8ccc-0123456789ab"],
    ),
]
AskedNode = Annotated[
    str | None,
    Query(
        description="Only decisions that bound their pod to this node, or for which it won.",
        examples=["gpu-a"],
    ),
]
AskedNodes = Annotated[
    bool,
    Query(
        description="true: include the names of the nodes in the last filter call of each pod.",
        examples=["true"],
    ),
]
AskedWouldReject = Annotated[
    bool,
    Query(
        description="true: only decisions that mode enforce would have rejected, with their sums.",
        examples=["true"],
    ),
]
AskedSince = Annotated[
    str | None,
    Query(description="Only decisions since this time or age (s, m, h, d).", examples=["15m"]),
]
DecisionId = Annotated[
    str,
    Path(
        description="uid and resourceVersion of the pod, as in its placement annotation.",
        examples=["3f2b7c1e-5f0a-4bbb-8ccc-0123456789ab.1234"],
    ),
]


@dataclass(frozen=True, slots=True)
class Sought:
    """A filter for decisions. Fields that are None or empty match everything."""

    pod: tuple[str, str] | None = None
    namespace: str = ""
    uid: str | None = None
    node: str | None = None
    #: Unix time in seconds.
    since_s: float | None = None
    #: Only decisions before this (timestamp, id), in the order of time.
    before: tuple[str, str] | None = None
    #: Whether to match only decisions that mode enforce would have rejected.
    would_reject: bool = False
    #: Whether to list the nodes of each pod's last filter call. This excludes no decision.
    offered_nodes: bool = False

    def wants(self, record: Record, at_s: float) -> bool:
        """Return whether the decision matches.

        ``at_s`` is the Unix time of the newest part of the decision on any replica.
        """
        return (
            (self.pod is None or self.pod == (record.namespace, record.name))
            and self.namespace in ("", record.namespace)
            and (self.uid is None or self.uid == record.uid)
            and (self.node is None or self.node == record.node)
            and (self.since_s is None or at_s >= self.since_s)
            and (not self.would_reject or would_reject(record) is not None)
            and (self.before is None or (stamp(at_s), record.decision_id) < self.before)
        )


def decisions(
    context: Context, sought: Sought, limit: int, sees: Sees
) -> tuple[list[DecisionView], list[Unanswered]]:
    """Return at most ``limit`` decisions, newest first.

    Also return the extenders whose journal cannot be read now, because their decisions may be
    missing.
    """
    journals, taken = list(context.journal.each()), limit

    def newest_s(decision_id: str) -> float:
        parts = [journal.records.of_id(decision_id) for _, journal in journals]
        return max(part.at_s for part in parts if part is not None)

    while True:
        found, is_cut = list[DecisionView](), False
        for replica, journal in journals:
            wanted = (
                record
                for record in journal.records.newest_first()
                if sought.wants(record, newest_s(record.decision_id))
            )
            some = [
                decision_view(record, replica, sees, _offered_nodes(journal, record, sought))
                for record in islice(wanted, taken)
            ]
            is_cut |= len(some) == taken
            found += some
        views = with_filters(context, merged(found), sees, sought.offered_nodes)
        if len(views) >= limit or not is_cut:
            return views[:limit], unread_extenders(context)
        taken *= 2  # a joined decision takes the place of two


def with_filters(
    context: Context, views: list[DecisionView], sees: Sees, offered_nodes: bool = False
) -> list[DecisionView]:
    """Join the binds that have no filter call with the filter calls of earlier versions of their
    pods."""
    uids = {each.uid for each in views if each.bind is not None and each.filter is None}
    if not uids:
        return views
    filtered = [
        decision_view(
            record,
            replica,
            sees,
            _offered_nodes(journal, record, Sought(offered_nodes=offered_nodes)),
        )
        for replica, journal in context.journal.each()
        for record in journal.records.newest_first()
        if record.uid in uids
    ]
    return joined_by_pod(views, [each for each in merged(filtered) if each.filter is not None])


def would_reject_sums(context: Context, sought: Sought) -> list[WouldRejectView]:
    """Count the pods of all matching decisions by verb and reason, most pods first."""
    uids: defaultdict[tuple[Rejects, Reason], set[str]] = defaultdict(set)
    for _, journal in context.journal.each():
        for record in journal.records.newest_first():
            rejected = would_reject(record)
            if rejected is not None and sought.wants(record, record.at_s):
                uids[rejected].add(record.uid)
    sums = [
        WouldRejectView(verb=verb, reason=reason.code, message=reason.sentence, pods=len(found))
        for (verb, reason), found in uids.items()
    ]
    return sorted(sums, key=lambda each: (-each.pods, each.verb, each.reason))


def _oldest(context: Context) -> str | None:
    """Return the time of the oldest decision on record."""
    times = (
        record.first_at_s
        for _, journal in context.journal.each()
        for record in journal.records.newest_first()
    )
    oldest_s = min(times, default=None)
    return None if oldest_s is None else stamp(oldest_s)


def unread_extenders(context: Context) -> list[Unanswered]:
    """Return the extenders whose journal cannot be read now, with the reasons."""
    return [
        Unanswered(peer=each.address, message=each.problem)
        for each in context.journal.followed()
        if each.problem and not each.is_gone
    ]


routes = APIRouter()


@routes.get("/v1/decisions", response_model=DecisionsBody)
def many(
    context: InContext,
    snap: Newest,
    sees: Visible,
    page: AskedPage,
    namespace: InNamespace = "",
    pod: AskedPod = None,
    uid: AskedUid = None,
    node: AskedNode = None,
    since: AskedSince = None,
    offered_nodes: AskedNodes = False,
    would_reject: AskedWouldReject = False,
) -> Response:
    """List the last decisions of all replicas, newest first; 100 unless ``limit`` is given. A
    decision that gets another call meanwhile moves to the front, so later pages do not repeat it. A
    decision that several replicas served can appear on two pages."""
    pod_namespace, _, pod_name = (pod or "").partition("/")
    sought = Sought(
        pod=(pod_namespace, pod_name) if pod else None,
        namespace=namespace,
        uid=uid,
        node=node,
        since_s=None if since is None else moment_s(since, context.wall_s()),
        before=_before(page.after) if page.after else None,
        would_reject=would_reject,
        offered_nodes=offered_nodes,
    )
    limit = page.limit or USUAL_PAGE
    found, unanswered = decisions(context, sought, limit + 1, sees)
    shown = found[:limit]
    more = "_".join(position(shown[-1])) if len(found) > limit else None
    body = DecisionsBody(
        **context.head(snap),
        decisions=[],
        would_reject=would_reject_sums(context, replace(sought, before=None))
        if would_reject
        else None,
        on_record_since=_oldest(context) if would_reject else None,
        continue_=more,
        unanswered=unanswered,
    )
    return listed(body, "decisions", shown)


@routes.get("/v1/decisions/{decision_id}", response_model=DecisionBody, responses=UNKNOWN)
def one(context: InContext, decision_id: DecisionId, snap: Newest) -> Response:
    """Return one decision with the results of all its verbs, merged over all replicas."""
    unanswered = unread_extenders(context)
    found = [
        decision_view(record, replica) for replica, record in context.journal.of_id(decision_id)
    ]
    if not found:
        missing = "".join(f"; extender {each.peer} does not answer" for each in unanswered)
        raise HTTPException(
            404,
            f"decision {decision_id} is unknown or no longer on record{missing}; "
            "GET /v1/decisions lists the decisions on record",
        )
    (decision,) = with_filters(context, merged(found), everything)
    body = DecisionBody(**context.head(snap), decision=decision, unanswered=unanswered)
    return encoded(body)


def _offered_nodes(journal: Journal, record: Record, sought: Sought) -> list[str] | None:
    """Return the nodes of the filter call, if they were asked for and are still on record."""
    decision = journal.of_uid(record.uid) if sought.offered_nodes else None
    if decision is None or decision.decision_id != record.decision_id:
        return None
    offered = decision.offered_nodes
    return offered.names() if offered else None


def moment_s(text: str, now_s: float) -> float:
    """Convert a time, or an age such as ``15m``, to Unix time in seconds.

    ``now_s`` is the current Unix time. Raises ``HTTPException`` 422.
    """
    if ago := re.fullmatch(r"(\d{1,6})([smhd])", text):
        return now_s - int(ago[1]) * _UNITS_S[ago[2]]
    try:
        then = datetime.fromisoformat(text.replace(" ", "+"))  # a plus sign in a query is a space
    except ValueError:
        raise HTTPException(
            422,
            f"query since: {text[:80]!r} is neither a time nor an age. "
            "Example: since=15m or since=2026-11-21T10:00:00Z",
        ) from None
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()


def _before(continue_: str) -> tuple[str, str]:
    """Parse the value of ``continue``: the position of the last decision of the previous page."""
    at, _, decision_id = continue_.replace(" ", "+").partition("_")  # as in moment_s
    return at, decision_id
