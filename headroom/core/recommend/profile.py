"""The profile of an owner, which contains its lives by container, device model and program.

A *program* is identified by the pod's image, arguments and environment. A program without known
lives gets no recommendation from the lives of other programs, because a changed argument often
means another model. If the arguments differ from life to life, as in sweeps, they identify no
program, and all lives of the container are combined.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from headroom.core.recommend.estimate import STEP_BYTES, Estimate, Others, pooled
from headroom.core.recommend.histogram import quantile, weight_above
from headroom.core.recommend.lives import LEAST_LIVES, Life, Track

#: Maximum number of programs of one container and model. If there are more, one is dropped or all
#: are combined.
MAX_PROGRAMS = 8
#: Maximum number of pairs of container and device model of one owner. If there are more, the pair
#: seen least recently is dropped.
MAX_CONTAINERS = 16
#: Name of the program of a container whose programs vary.
ANY_PROGRAM = ""
#: A program sizes itself if at least this share of its lives is flat, and if its peaks differ by at
#: most ``SELF_SIZED_WITHIN``.
SELF_SIZED_SHARE = 0.8
#: Maximum factor between the peaks of a program that sizes itself.
SELF_SIZED_WITHIN = 1.06


class Missing(Enum):
    """Why there is no recommendation."""

    NO_LIVES = "no-lives"
    FEW_LIVES = "few-lives"
    #: All weights have decayed to nothing.
    OLD_LIVES = "old-lives"
    NEW_PROGRAM = "new-program"
    #: The use of many lives grew or jumped after their first day.
    UNSETTLED = "unsettled"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended request of a container on a device model, and its basis."""

    #: The request in bytes, or None if there is no recommendation, for the reason in ``missing``.
    request_bytes: int | None
    missing: Missing | None
    #: Number of complete lives, including running lives.
    lives: int
    #: Seconds from the start of the first life to the end of the last life, or until now.
    span_s: float
    #: Quantile of the peaks to which the margin is added, or 0 if there is no request.
    quantile_bytes: int = 0
    highest_bytes: int = 0
    #: Share of the lives, weighted by age, whose peaks are above the request.
    above_ratio: float = 0.0
    #: Number of lives that ended while there was a recommendation, and the number of them that
    #: exceeded it.
    tested: int = 0
    missed: int = 0
    self_sized: bool = False
    #: Whether the lives suggest more memory than the device has. If so, the request is the device's
    #: memory.
    whole_device: bool = False
    #: Number of lives whose use grew or jumped after their first day.
    unsettled: int = 0
    #: The highest peak of the container's other programs if it is above the request, and the number
    #: of their lives. Otherwise 0.
    others_highest_bytes: int = 0
    others_lives: int = 0


@dataclass(slots=True)
class ContainerProfile:
    """The lives of one container on one device model."""

    #: The tracks in the order of their last life, oldest first.
    tracks: dict[str, Track] = field(default_factory=dict)
    #: Whether programs differ from life to life. If so, there is a single track for
    #: ``ANY_PROGRAM``.
    varies: bool = False
    #: Memory of the largest device of the model, which limits requests, or 0 if unknown.
    memory_bytes: int = 0

    @property
    def last_s(self) -> float:
        return max((track.last_s for track in self.tracks.values()), default=0.0)

    def record(self, program: str, life: Life) -> None:
        """Add a life that ended."""
        track = self._track(program)
        track.record(life, self._others(track))

    def replace_running(self, lives: Iterable[tuple[str, Life]]) -> None:
        """Replace the running lives. ``lives`` contains the program of each life."""
        by_program: dict[str, list[Life]] = {}
        for program, life in lives:
            by_program.setdefault(program, []).append(life)
        if not self.varies:
            for program in by_program:
                self._track(program)  # may find that programs vary
        if self.varies:
            by_program = {ANY_PROGRAM: [each for lives in by_program.values() for each in lives]}
        for program in by_program:
            self._track(program)
        for program, track in self.tracks.items():
            track.replace_running(by_program.get(program, ()))

    def recommendation(self, program: str, now_s: float) -> Recommendation:
        """Return the recommended request of a container with this program."""
        track = self.tracks.get(ANY_PROGRAM if self.varies else program)
        if track is None:
            lives = sum(track.lives for track in self.tracks.values())
            return Recommendation(None, Missing.NEW_PROGRAM if lives else Missing.NO_LIVES, 0, 0.0)
        track.decay(now_s)
        span_s = max(0.0, track.last_s - track.first_s)
        if track.is_unsettled:
            lives = track.unsettled + track.running_unsettled
            late = max(lives, track.outgrown + track.running_outgrown)
            return Recommendation(
                None, Missing.UNSETTLED, track.lives + lives, span_s, unsettled=late
            )
        found = track.estimate(self._others(track))
        if found is None:
            missing = Missing.FEW_LIVES if track.lives else Missing.NO_LIVES
            if track.lives >= LEAST_LIVES:
                missing = Missing.OLD_LIVES
            return Recommendation(None, missing, track.lives, span_s)
        request_bytes = self._limited(found.request_bytes)
        above = [
            (other.highest_bytes, max(1, other.lives))
            for other in self.tracks.values()
            if other is not track and other.highest_bytes > request_bytes
        ]
        return replace(
            _recommendation(track, found, request_bytes, span_s),
            others_highest_bytes=max((peak for peak, _ in above), default=0),
            others_lives=sum(lives for _, lives in above),
        )

    def highest(self) -> tuple[int, int]:
        """Return the highest recorded peak of all programs, and the number of their lives."""
        tracks = self.tracks.values()
        lives = sum(track.lives + track.unsettled + track.running_unsettled for track in tracks)
        return max((track.highest_bytes for track in tracks), default=0), max(1, lives)

    def _others(self, own: Track) -> Others:
        """Return the figures of the other programs."""
        tracks = [track for track in self.tracks.values() if track is not own]
        return Others(
            pooled(track.spread() for track in tracks),
            sum(track.weighted_misses for track in tracks),
        )

    def _limited(self, request_bytes: int) -> int:
        """Return the request, limited to the device's memory because a larger request fits on no
        node."""
        most_bytes = self.memory_bytes // STEP_BYTES * STEP_BYTES
        return min(request_bytes, most_bytes) if most_bytes else request_bytes

    def _track(self, program: str) -> Track:
        """Return the track of a program. For a new program, another track may be dropped or all
        merged."""
        key = ANY_PROGRAM if self.varies else program
        if key not in self.tracks:
            if len(self.tracks) >= MAX_PROGRAMS:
                self._drop_or_merge()
            key = ANY_PROGRAM if self.varies else program
        # Moves it to the end.
        track = self.tracks.pop(key, None) or Track()
        self.tracks[key] = track
        return track

    def _drop_or_merge(self) -> None:
        """Merge all tracks if at least half of them have few lives, otherwise drop the oldest."""
        few = sum(track.lives < LEAST_LIVES for track in self.tracks.values())
        if 2 * few < len(self.tracks):
            self.tracks.pop(next(iter(self.tracks)))
            return
        all_lives = Track()
        for track in self.tracks.values():
            all_lives.merge(track)
        self.tracks, self.varies = {ANY_PROGRAM: all_lives}, True


def _recommendation(
    track: Track, found: Estimate, request_bytes: int, span_s: float
) -> Recommendation:
    weights = dict(track.complete.weights)
    for bucket, weight in track.running.weights.items():
        weights[bucket] = weights.get(bucket, 0.0) + weight
    return Recommendation(
        request_bytes,
        None,
        track.lives,
        span_s,
        found.centre_bytes,
        found.highest_bytes,
        weight_above(weights, request_bytes) / sum(weights.values()),
        track.tested,
        track.missed,
        _self_sized(track, weights),
        request_bytes < found.request_bytes,
    )


def _self_sized(track: Track, weights: Mapping[int, float]) -> bool:
    """Return whether the program allocates memory once and then keeps it."""
    if track.ended < LEAST_LIVES or track.flat < SELF_SIZED_SHARE * track.ended:
        return False
    return quantile(weights, 0.95) <= quantile(weights, 0.05) * SELF_SIZED_WITHIN


@dataclass(slots=True)
class Profile:
    """The lives of one owner."""

    #: Lives by (container, device model).
    containers: dict[tuple[str, str], ContainerProfile] = field(default_factory=dict)

    def container(self, container: str, model: str) -> ContainerProfile:
        """Return the lives of a container on a device model, to read or to add lives."""
        key = (container, model)
        if key not in self.containers:
            if len(self.containers) >= MAX_CONTAINERS:
                oldest = min(self.containers, key=lambda each: self.containers[each].last_s)
                del self.containers[oldest]
            self.containers[key] = ContainerProfile()
        return self.containers[key]
