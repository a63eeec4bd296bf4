"""Assumed binds and nominations: what an extender counts before the API server shows it.

Each extender writes its assumed binds and nominations into its journal's stream. A console counts
the last line of each extender that it follows. A line expires if its extender has sent nothing for
``EXPIRES_S``. By then the binds have ended, and the API server shows their reservations.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from contract.gpunode import Reservation
from extender.observability.journal_follower import SILENT_S
from extender.observability.journal_merge import Followed
from extender.observability.journal_stream import MAX_ASSUMED, AssumedBind, AssumedLine, Nomination
from extender.periodic import Loops
from extender.state.changes import AssumedSeen, Event
from extender.state.cluster_state import ClusterState
from extender.state.nominations import Place

EVERY_S = 0.25
EXPIRES_S = SILENT_S


def assumed_line(
    cluster: ClusterState, coming: Iterable[tuple[str, str, Reservation]], now_s: float
) -> AssumedLine:
    """Return what the extender assumes now. ``coming`` are the uid, node and reservation of pods
    whose bind it expects next."""
    binds = {
        (uid, node): reservation
        for node, under_way in cluster.binds_under_way().items()
        for uid, reservation in under_way.items()
    }
    for uid, node, reservation in coming:
        binds.setdefault((uid, node), reservation)
    places = sorted(cluster.places(now_s).items(), key=lambda each: not each[1].held)
    return AssumedLine(
        tuple(AssumedBind(*at, binds[at]) for at in islice(binds, MAX_ASSUMED)),
        tuple(Nomination(uid, place.node, place.held) for uid, place in places[:MAX_ASSUMED]),
    )


def assumed_by(followed: Iterable[Followed]) -> AssumedSeen:
    """Return what these extenders assume together, as far as their lines have not expired."""
    lines = [
        each.assumed
        for each in followed
        if each.assumed is not None
        and not each.is_gone
        and each.heard_s is not None
        and each.heard_s < EXPIRES_S
    ]
    binds: dict[str, dict[str, Reservation]] = {}
    places: dict[str, Place] = {}
    for line in lines:
        for bind in line.binds:
            binds.setdefault(bind.node, {})[bind.uid] = bind.reservation
        for nomination in line.nominations:
            known = places.get(nomination.uid)
            if known is None or nomination.held:
                places[nomination.uid] = Place(nomination.node, nomination.held)
    return AssumedSeen(binds, places if lines else None)


class AssumedBindsUpdater:
    """Applies the assumed binds and nominations of the extenders whenever they change."""

    def __init__(
        self,
        followed: Callable[[], Iterable[Followed]],
        apply: Callable[[Sequence[Event]], None],
    ) -> None:
        self._followed = followed
        self._apply = apply
        self._last = AssumedSeen({}, None)

    def start(self, loops: Loops) -> None:
        loops.start("assumed", self.once, EVERY_S)

    async def once(self) -> None:
        seen = assumed_by(self._followed())
        if seen != self._last:
            self._apply([seen])
            self._last = seen
