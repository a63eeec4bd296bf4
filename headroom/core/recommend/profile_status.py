"""Converts the lives of an owner to the status of a VRAMProfile, and back."""

from collections.abc import Mapping

from headroom.contract.printable import plain
from headroom.contract.vramprofile import (
    ContainerStatus,
    ProfileOwner,
    TrackStatus,
    VRAMProfileStatus,
    seconds,
    stamp,
)
from headroom.core.recommend.estimate import placeable
from headroom.core.recommend.histogram import MAX_WEIGHT, Histogram
from headroom.core.recommend.lives import Track
from headroom.core.recommend.profile import (
    MAX_CONTAINERS,
    MAX_PROGRAMS,
    ContainerProfile,
    Profile,
)


def status_of(
    profile: Profile,
    owner: ProfileOwner,
    families: Mapping[tuple[str, str], str],
    now_s: float,
) -> VRAMProfileStatus:
    """Return the status to write. All weights decay to ``now_s``.

    ``families`` maps (container, device model) to the family of the newest program.
    """
    containers = [
        ContainerStatus(
            container=container,
            model=plain(model),
            memory_bytes=lives.memory_bytes,
            family=families.get((container, model), ""),
            varies=lives.varies,
            tracks=[_track_status(name, track, now_s) for name, track in lives.tracks.items()],
        )
        for (container, model), lives in sorted(profile.containers.items())
    ]
    total = sum(t.lives for c in profile.containers.values() for t in c.tracks.values())
    return VRAMProfileStatus(
        observed_at=stamp(now_s), owner=owner, containers=containers, lives=total
    )


def newest_requests(
    status: VRAMProfileStatus, now_s: float, largest: Mapping[str, int]
) -> dict[str, int]:
    """Return the recommendation for the newest program of each container in bytes.

    If there are several device models, ``placeable`` chooses, to which ``largest`` is passed.
    Containers without a recommendation are omitted.
    """
    by_model: dict[str, dict[str, int]] = {}
    for (name, model), lives in restored(status).containers.items():
        newest = next(reversed(lives.tracks), "")
        amount = lives.recommendation(newest, now_s).request_bytes
        if amount is not None:
            by_model.setdefault(name, {})[model] = amount
    found = {name: placeable(amounts, largest) for name, amounts in by_model.items()}
    return {name: amount for name, amount in found.items() if amount is not None}


def restored(status: VRAMProfileStatus) -> Profile:
    """Return the lives in a status. Entries beyond the limits are dropped."""
    profile = Profile()
    for each in status.containers[:MAX_CONTAINERS]:
        tracks = each.tracks[-MAX_PROGRAMS:]
        profile.containers[each.container, each.model] = ContainerProfile(
            {track.program: _track(track) for track in tracks},
            each.varies,
            max(0, each.memory_bytes),
        )
    return profile


def _track_status(program: str, track: Track, now_s: float) -> TrackStatus:
    track.decay(now_s)
    return TrackStatus(
        program=program,
        as_of=stamp(track.complete.as_of_s),
        complete=track.complete.checkpoint(),
        censored=track.censored.checkpoint(),
        running=track.running.checkpoint(),
        running_censored=track.running_censored.checkpoint(),
        ended=track.ended,
        flat=track.flat,
        first=stamp(track.first_s),
        last=stamp(track.last_s),
        tested=track.tested,
        missed=track.missed,
        missed_fitting=track.missed_fitting,
        unsettled=track.unsettled,
        running_unsettled=track.running_unsettled,
        outgrown=track.outgrown,
        running_outgrown=track.running_outgrown,
    )


def _track(status: TrackStatus) -> Track:
    as_of_s = seconds(status.as_of)
    ended, tested = _count(status.ended), _count(status.tested)
    missed = min(_count(status.missed), tested)
    return Track(
        Histogram.restored(status.complete, as_of_s),
        Histogram.restored(status.censored, as_of_s),
        Histogram.restored(status.running, as_of_s),
        Histogram.restored(status.running_censored, as_of_s),
        ended,
        min(_count(status.flat), ended),
        seconds(status.first),
        seconds(status.last),
        tested,
        missed,
        min(_count(status.missed_fitting), missed),
        _count(status.unsettled),
        _count(status.running_unsettled),
        _count(status.outgrown),
        _count(status.running_outgrown),
    )


def _count(lives: int) -> int:
    return max(0, min(lives, MAX_WEIGHT))
