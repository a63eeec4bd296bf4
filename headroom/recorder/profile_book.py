"""Holds the profiles in memory and decides which of them must be written."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from headroom.contract.kube import ObjectMeta, OwnerReference
from headroom.contract.vramprofile import (
    MAX_CONTROLLERS,
    ProfileOwner,
    VRAMProfile,
    profile_name,
    seconds,
)
from headroom.core.recommend.histogram import bucket_of
from headroom.core.recommend.profile import Profile
from headroom.core.recommend.profile_status import restored, status_of
from headroom.recorder.life_tracker import TrackedLife

#: Maximum number of lives of a profile that wait to be written. Beyond it, the oldest lives are
#: dropped.
MAX_PENDING = 1000
#: Seconds between two writes of a profile if lives have ended.
ENDED_EVERY_S = 30.0
#: Seconds between two writes of a profile if no life has ended.
RUNNING_EVERY_S = 600.0
#: A profile is deleted after this number of seconds without a life. By then, the weight of each of
#: its lives has halved ten times.
FORGOTTEN_AFTER_S = 100 * 86400.0

#: Namespace and name of a profile.
ProfileKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Owned:
    """A life with its owner, and with an owner reference, so that Kubernetes deletes the profile
    with the owner."""

    tracked: TrackedLife
    owner: ProfileOwner
    #: A reference to the owner. None for a family of owners, because the profile outlives each
    #: owner.
    reference: OwnerReference | None = None

    @property
    def key(self) -> ProfileKey:
        return self.tracked.pod.namespace, profile_name(self.owner)


@dataclass(slots=True)
class _Entry:
    #: The profile on the API server, or None if it does not exist there.
    stored: VRAMProfile | None
    pending: list[Owned] = field(default_factory=list)
    running: list[Owned] = field(default_factory=list)
    #: Digest of the running lives at the last write.
    written: frozenset[tuple[str, ...]] = frozenset()
    #: Time of the last write or the last failed attempt.
    written_s: float = 0.0
    #: A write without a response, which may have changed the object. It is repeated unchanged until
    #: a response shows whether its lives are recorded.
    unanswered: "Write | None" = None


@dataclass(frozen=True, slots=True)
class Write:
    """A profile to create, or to replace if its resourceVersion is unchanged."""

    key: ProfileKey
    profile: VRAMProfile
    #: Number of lives of ``pending`` that the write contains.
    taken: int


class ProfileBook:
    """Holds all profiles. Only the process that holds the Lease writes them."""

    def __init__(self) -> None:
        self._entries: dict[ProfileKey, _Entry] = {}

    def load(self, profiles: Iterable[VRAMProfile]) -> None:
        """Replace all profiles with the profiles of the API server. Pending lives are kept."""
        before = self._entries
        self._entries = {}
        for profile in profiles:
            self.stored((profile.metadata.namespace, profile.metadata.name), profile)
        for key, entry in before.items():
            if entry.pending:
                self._entries.setdefault(key, _Entry(None)).pending = entry.pending

    def stored(self, key: ProfileKey, profile: VRAMProfile | None) -> None:
        """Store the profile that the API server has, or None if it was deleted."""
        self._entries.setdefault(key, _Entry(None)).stored = profile

    def take(self, ended: Iterable[Owned], running: Iterable[Owned]) -> None:
        """Add lives that ended, and replace running lives."""
        for entry in self._entries.values():
            entry.running = []
        for each in ended:
            entry = self._entries.setdefault(each.key, _Entry(None))
            entry.pending.append(each)
            if len(entry.pending) > MAX_PENDING:
                del entry.pending[0]
                if (sent := entry.unanswered) is not None:
                    entry.unanswered = replace_fields(sent, taken=max(0, sent.taken - 1))
        for each in running:
            self._entries.setdefault(each.key, _Entry(None)).running.append(each)
        for key, entry in list(self._entries.items()):
            if entry.stored is None and not entry.pending and not entry.running:
                del self._entries[key]

    def due(self, now_s: float, at_most: int) -> list[ProfileKey]:
        """Return the profiles to write now, starting with the profile that has waited longest."""
        due = [
            (entry.written_s, key) for key, entry in self._entries.items() if _is_due(entry, now_s)
        ]
        return [key for _, key in sorted(due)[:at_most]]

    def forgotten(self, now_s: float) -> list[tuple[ProfileKey, VRAMProfile]]:
        """Return the profiles to delete, whose lives all ended long ago."""
        return [
            (key, entry.stored)
            for key, entry in self._entries.items()
            if entry.stored is not None
            and not entry.pending
            and not entry.running
            and now_s - seconds(entry.stored.status.observed_at) > FORGOTTEN_AFTER_S
        ]

    def written(self, write: Write, profile: VRAMProfile, now_s: float) -> None:
        """Store the profile that the API server returned for a write, and remove its lives."""
        entry = self._entries.get(write.key)
        if entry is not None:
            entry.stored = profile
            entry.pending = entry.pending[write.taken :]
            entry.written, entry.written_s = _digest(entry.running), now_s
            entry.unanswered = None

    def conflicted(self, write: Write, profile: VRAMProfile | None, now_s: float) -> None:
        """Store the profile that the API server has after a conflict, or None if it was deleted.

        If the profile has the status of this write, an earlier attempt was successful, and only its
        response was lost.
        """
        if profile is not None and profile.status == write.profile.status:
            self.written(write, profile, now_s)
        elif (entry := self._entries.get(write.key)) is not None:
            entry.stored, entry.unanswered = profile, None

    def delayed(self, key: ProfileKey, now_s: float, unanswered: Write | None = None) -> None:
        """Record that a write failed, so that writes of other profiles come first.

        ``unanswered`` is the write, if the API server may have executed it.
        """
        if (entry := self._entries.get(key)) is not None:
            entry.written_s, entry.unanswered = now_s, unanswered

    def drop(self, key: ProfileKey) -> None:
        """Remove a profile that was deleted, with its pending lives."""
        self._entries.pop(key, None)

    def is_new(self, each: Owned) -> bool:
        """Return whether no complete life of this container is recorded."""
        entry = self._entries.get(each.key)
        containers = entry.stored.status.containers if entry and entry.stored else ()
        name = each.tracked.container
        return not any(
            track.ended
            for status in containers
            if status.container == name
            for track in status.tracks
        )

    @property
    def waiting(self) -> int:
        """Return the number of lives that are not written yet."""
        return sum(len(entry.pending) for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def write(self, key: ProfileKey, now_s: float) -> Write:
        """Return the next write of a profile that is due."""
        entry = self._entries[key]
        if entry.unanswered is not None:
            return entry.unanswered
        stored = entry.stored
        profile = restored(stored.status) if stored is not None else Profile()
        families = (
            {(c.container, c.model): c.family for c in stored.status.containers} if stored else {}
        )
        for each in entry.pending:
            _record(profile, each, families)
        _replace_running(profile, entry.running, families)
        newest = (entry.running or entry.pending)[-1] if entry.running or entry.pending else None
        owner = newest.owner if newest else (stored.status.owner if stored else ProfileOwner())
        metadata = stored.metadata if stored else ObjectMeta(namespace=key[0], name=key[1])
        if newest is not None and newest.reference is not None:
            metadata = replace(metadata, owner_references=[newest.reference])
        controllers = list(stored.status.controllers) if stored else []
        for each in (*entry.pending, *entry.running):
            if (found_by := each.tracked.pod.found_by) in controllers:
                controllers.remove(found_by)
            controllers.append(found_by)
        status = replace(
            status_of(profile, owner, families, now_s), controllers=controllers[-MAX_CONTROLLERS:]
        )
        return Write(key, VRAMProfile(metadata=metadata, status=status), len(entry.pending))


def _record(profile: Profile, each: Owned, families: dict[tuple[str, str], str]) -> None:
    tracked = each.tracked
    container = profile.container(tracked.container, tracked.model)
    container.memory_bytes = max(container.memory_bytes, tracked.memory_bytes)
    container.record(tracked.program.fingerprint, tracked.life)
    families[tracked.container, tracked.model] = tracked.program.family.value


def _replace_running(
    profile: Profile, running: Iterable[Owned], families: dict[tuple[str, str], str]
) -> None:
    by_container: dict[tuple[str, str], list[TrackedLife]] = {}
    for each in running:
        tracked = each.tracked
        by_container.setdefault((tracked.container, tracked.model), []).append(tracked)
    for key, lives in by_container.items():
        families[key] = lives[-1].program.family.value
        container = profile.container(*key)
        # Earlier values do not count, because the effect of a false report must end with its life.
        container.memory_bytes = max(each.memory_bytes for each in lives)
        container.replace_running((each.program.fingerprint, each.life) for each in lives)
    for key, container in profile.containers.items():
        if key not in by_container:
            container.replace_running(())


def _digest(running: Iterable[Owned]) -> frozenset[tuple[str, ...]]:
    """Return the properties of running lives that can change a recommendation."""
    return frozenset(
        (
            each.tracked.container,
            each.tracked.model,
            each.tracked.program.fingerprint,
            str(each.tracked.life.started_s),
            str(bucket_of(each.tracked.life.peak_bytes)),
            str(each.tracked.life.censored),
        )
        for each in running
    )


def _is_due(entry: _Entry, now_s: float) -> bool:
    age_s = now_s - entry.written_s
    if entry.pending:
        return age_s >= ENDED_EVERY_S
    return age_s >= RUNNING_EVERY_S and _digest(entry.running) != entry.written
