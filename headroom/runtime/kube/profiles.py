"""Keeps the VRAMProfiles that the watch delivers, and finds the profile of a pod."""

import threading
from collections.abc import Sequence

from headroom.contract.vramprofile import ProfileController, VRAMProfile
from headroom.contract.watched import ProfileGone, ProfileSeen, Relisted, WatchEvent

#: Namespace and name of a profile.
Key = tuple[str, str]


class Profiles:
    """Caches the latest version of every profile. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._profiles: dict[Key, VRAMProfile] = {}
        #: The keys of the profiles for pods of each (namespace, controller).
        self._found_by: dict[tuple[str, ProfileController], set[Key]] = {}

    def apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply the events about VRAMProfiles, and ignore events about other kinds."""
        with self._lock:
            for event in events:
                match event:
                    case ProfileSeen(profile=profile):
                        self._put(profile)
                    case ProfileGone(namespace=namespace, name=name):
                        self._remove((namespace, name))
                    case Relisted(objects=objects) if event.kind is VRAMProfile:
                        for key in list(self._profiles):
                            self._remove(key)
                        for each in objects:
                            if isinstance(each, VRAMProfile):
                                self._put(each)

    def all(self) -> list[VRAMProfile]:
        """Return all profiles, sorted by namespace and name."""
        with self._lock:
            return [self._profiles[key] for key in sorted(self._profiles)]

    def of(self, namespace: str, controller: ProfileController) -> VRAMProfile | None:
        """Return the profile of pods with this controller, or the newest if there are several."""
        with self._lock:
            keys = self._found_by.get((namespace, controller), ())
            found = [self._profiles[key] for key in keys]
        return max(found, key=lambda each: each.status.observed_at, default=None)

    def _put(self, profile: VRAMProfile) -> None:
        key = (profile.metadata.namespace, profile.metadata.name)
        self._remove(key)
        self._profiles[key] = profile
        for controller in profile.status.controllers:
            self._found_by.setdefault((key[0], controller), set()).add(key)

    def _remove(self, key: Key) -> None:
        profile = self._profiles.pop(key, None)
        if profile is None:
            return
        for controller in profile.status.controllers:
            index = (key[0], controller)
            keys = self._found_by.get(index, set())
            keys.discard(key)
            if not keys:
                self._found_by.pop(index, None)
