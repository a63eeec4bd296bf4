"""A round of the recorder, which reads changed objects and writes the profiles that are due."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from headroom.bounded_dict import Bounded
from headroom.contract.gpunode import GPUNode, GPUNodeStatus
from headroom.contract.kube import OwnerReference
from headroom.contract.vramprofile import ProfileOwner, VRAMProfile
from headroom.contract.watched import (
    GPUNodeGone,
    GPUNodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    WatchEvent,
)
from headroom.recorder.kube_profiles import OwnerReader, ProfileStore
from headroom.recorder.life_tracker import LifeTracker, TrackedLife
from headroom.recorder.metrics import RecorderTelemetry
from headroom.recorder.past_lives import PastLives
from headroom.recorder.pod_facts import ObservedPod, PodFacts
from headroom.recorder.profile_book import Owned, ProfileBook, ProfileKey
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.loops import on_thread

log = structlog.get_logger()

#: Maximum number of writes per round. Further writes wait for the next round.
MAX_WRITES = 100
#: Maximum number of deleted pods whose lives have not been recorded yet.
MAX_GONE = 10_000
#: Maximum number of lives whose owner could not be read yet.
MAX_UNOWNED = 10_000


class Observed:
    """The newest reports and pods. ``apply`` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, GPUNodeStatus] = {}
        self._pods: dict[str, PodFacts] = {}
        self._gone: Bounded[str, PodFacts] = Bounded(MAX_GONE)

    def apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply the events of watches."""
        with self._lock:
            for event in events:
                self._apply(event)

    def take(self) -> tuple[dict[str, GPUNodeStatus], dict[str, PodFacts], dict[str, PodFacts]]:
        """Return copies of the reports by node, of the pods, and of the pods that were deleted
        since the last call."""
        with self._lock:
            gone = dict(self._gone)
            self._gone.clear()
            return dict(self._reports), dict(self._pods), gone

    def _apply(self, event: WatchEvent) -> None:
        match event:
            case PodSeen(pod=ObservedPod() as pod):
                if pod.facts is not None:
                    self._pods[pod.metadata.uid] = pod.facts
            case PodGone(uid=uid):
                self._lose(uid)
            case GPUNodeSeen(gpunode=node):
                self._see(node)
            case GPUNodeGone(name=name):
                self._reports.pop(name, None)
            case Relisted(objects=objects) if event.kind is ObservedPod:
                listed = {each.metadata.uid for each in objects}
                for uid in [uid for uid in self._pods if uid not in listed]:
                    self._lose(uid)
                for each in objects:
                    self._apply(PodSeen(each))  # type: ignore[arg-type]
            case Relisted(objects=objects):
                self._reports.clear()
                for each in objects:
                    if isinstance(each, GPUNode):
                        self._see(each)

    def _see(self, node: GPUNode) -> None:
        if node.status is not None:
            self._reports[node.name] = node.status

    def _lose(self, uid: str) -> None:
        if (facts := self._pods.pop(uid, None)) is not None:
            self._gone[uid] = facts


class Recorder:
    """Records lives while this recorder is the leader."""

    def __init__(
        self,
        observed: Observed,
        owners: OwnerReader,
        store: ProfileStore,
        leads: Callable[[], bool],
        telemetry: RecorderTelemetry,
        now_s: Callable[[], float],
        past: PastLives | None = None,
    ) -> None:
        self._past = PastLives() if past is None else past
        self._observed, self._owners, self._store = observed, owners, store
        self._leads, self._telemetry, self._now_s = leads, telemetry, now_s
        self._tracker, self._book = LifeTracker(), ProfileBook()
        self._is_loaded = False
        #: Lives that have ended and whose owner is not known yet.
        self._unowned: list[TrackedLife] = []
        #: The owners of running lives, by the namespace and uid of their controllers. So a round
        #: needs threads only for new controllers, and not for each of 100,000 lives.
        self._known: dict[tuple[str, str], tuple[ProfileOwner, OwnerReference | None]] = {}

    async def round(self) -> None:
        """Process the reports and write the profiles that are due. Without the Lease, drop all
        state.

        A recorder that becomes the leader follows the lives that run from then on. Lives that ended
        earlier and were not written are lost.
        """
        self._telemetry.leads.set(self._leads())
        if not self._leads():
            self._tracker, self._book, self._is_loaded = LifeTracker(), ProfileBook(), False
            self._unowned, self._known = [], {}
            self._telemetry.profiles.set(0)
            self._observed.take()
            return
        if not self._is_loaded:
            self._book.load(await on_thread(self._store.list))
            self._is_loaded = True
        now_s = self._now_s()
        ended = self._tracker.follow(*self._observed.take(), now_s)
        for each in ended:
            assert each.life.ending is not None
            self._telemetry.lives.labels(each.life.ending.value).inc()
        waiting = [*self._unowned, *ended][-MAX_UNOWNED:]
        owned, self._unowned = await self._with_owners(waiting)
        running, _ = await self._with_owners(self._tracker.running)
        keys = {_controller_key(each.tracked.pod) for each in running}
        self._known = {key: self._known[key] for key in keys if key in self._known}
        self._book.take([*self._past.claim(running, self._book.is_new), *owned], running)
        await self._write_due(now_s)
        self._telemetry.profiles.set(len(self._book))
        self._telemetry.past_lives.set(len(self._past))
        self._telemetry.waiting.set(self._book.waiting + len(self._unowned))

    async def _with_owners(
        self, lives: Sequence[TrackedLife]
    ) -> tuple[list[Owned], list[TrackedLife]]:
        """Return lives with their owners, and lives whose owner cannot be read now."""
        owned: list[Owned] = []
        unowned: list[TrackedLife] = []
        for each in lives:
            try:
                owned.append(Owned(each, *await self._owner(each.pod)))
            except ApiError as err:
                log.warning(
                    "owner_unknown",
                    namespace=each.pod.namespace,
                    pod=each.pod.name,
                    error=str(err),
                )
                unowned.append(each)
        return owned, unowned

    async def _owner(self, pod: PodFacts) -> tuple[ProfileOwner, OwnerReference | None]:
        if pod.controller is None:
            return self._owners.owner(pod)  # found by the pod's name
        key = _controller_key(pod)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = await on_thread(partial(self._owners.owner, pod))
        return found

    async def _write_due(self, now_s: float) -> None:
        for key in self._book.due(now_s, MAX_WRITES):
            if not self._leads():
                return
            try:
                outcome = await self._write(key, now_s)
            except Exception:  # other owners must not wait for this profile
                log.exception("profile_not_written", namespace=key[0], name=key[1])
                self._book.delayed(key, now_s)
                outcome = "failed"
            self._telemetry.writes.labels(outcome).inc()
        for key, profile in self._book.forgotten(now_s):
            try:
                await self._delete(key, profile)
            except ApiError as err:
                log.warning("profile_not_deleted", namespace=key[0], name=key[1], error=str(err))

    async def _delete(self, key: ProfileKey, profile: VRAMProfile) -> None:
        try:
            await on_thread(partial(self._store.delete, profile))
        except ApiStatus as err:
            if err.status != 409:
                raise
            self._book.stored(key, await on_thread(partial(self._store.read, *key)))
        else:
            self._book.drop(key)

    async def _write(self, key: ProfileKey, now_s: float) -> str:
        write = self._book.write(key, now_s)
        try:
            stored = await on_thread(partial(self._store.write, write.profile))
            self._book.written(write, stored, now_s)
            return "written"
        except ApiStatus as err:
            if err.status == 404:
                # The profile, or its namespace, was deleted.
                self._book.drop(key)
                return "conflict"
            failure: ApiError = err
        except ApiError as err:
            failure = err
        if isinstance(failure, ApiStatus) and failure.status == 409:
            try:
                found = await on_thread(partial(self._store.read, *key))
            except ApiError as err:
                failure = err
            else:
                self._book.conflicted(write, found, now_s)
                return "conflict"
        log.warning("profile_not_written", namespace=key[0], name=key[1], error=str(failure))
        rejected = isinstance(failure, ApiStatus) and failure.status < 500
        self._book.delayed(key, now_s, None if rejected else write)
        return "failed"


def _controller_key(pod: PodFacts) -> tuple[str, str]:
    """Return the namespace and the uid of the pod's controller. The namespace is needed, because a
    user can write the uid of a controller in another namespace."""
    return pod.namespace, pod.controller.uid if pod.controller else ""
