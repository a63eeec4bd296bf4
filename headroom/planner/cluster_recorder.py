"""Watches pods, nodes and agents' reports, and keeps a recording in a file."""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, Pod
from headroom.contract.watched import (
    GPUNodeGone,
    GPUNodeSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    WatchEvent,
    changes_of,
)
from headroom.core.placement.request import asks_for_gpu
from headroom.errors import BadSettings
from headroom.planner.api_objects import RULES
from headroom.planner.recording import EXAMPLE, Recording, read_recording
from headroom.planner.wording import plural
from headroom.runtime.kube.client import KubeApi, load_configuration
from headroom.runtime.kube.reflector import Reflector
from headroom.runtime.kube.resources import Kind, watched_kinds

#: Seconds between two writes of the recording, and the minimum pause after a write as a multiple of
#: its duration.
_EVERY_S, _DURATIONS = 60.0, 50
_TICK_S = 0.5


class Recorder:
    """Applies events of the watches to a recording. Any thread may call it."""

    def __init__(self, recording: Recording, clock: Callable[[], float] = time.time) -> None:
        self._recording, self._clock = recording, clock
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._reports: dict[str, GPUNode] = {}

    def deliver(self, events: Sequence[WatchEvent]) -> None:
        with self._lock:
            now_s = self._clock()
            for event in events:
                if isinstance(event, Relisted) and event.kind is Pod:
                    uids = {pod.metadata.uid for pod in event.objects}
                    self._recording.pods_listed(uids, now_s)
                if isinstance(event, Relisted):
                    known = self._nodes if event.kind is Node else self._reports
                    gone = () if event.kind is Pod else tuple(known)
                    for change in changes_of(event, gone):
                        self._apply(change, now_s)
                else:
                    self._apply(event, now_s)

    def contact(self, now_s: float) -> None:
        with self._lock:
            self._recording.contact(now_s)

    def summary(self) -> str:
        """Describe how many pods with a GPU run, and how many nodes have GPUs."""
        with self._lock:
            running = sum(pod.ended_s is None for pod in self._recording.pods.values())
            return f"{plural(running, 'pod')} on {plural(len(self._recording.nodes), 'node')}"

    def encoded(self) -> bytes:
        with self._lock:
            return msgspec.json.encode(self._recording)

    def _apply(self, event: WatchEvent | None, now_s: float) -> None:
        match event:
            case PodSeen(pod=pod):
                self._recording.pod_seen(pod, now_s)
            case PodGone(uid=uid):
                self._recording.pod_gone(uid, now_s)
            case NodeSeen(node=node):
                self._nodes[node.metadata.name] = node
                self._report(node.metadata.name)
            case NodeGone(name=name):
                self._nodes.pop(name, None)
            case GPUNodeSeen(gpunode=gpunode):
                self._reports[gpunode.metadata.name] = gpunode
                self._report(gpunode.metadata.name)
            case GPUNodeGone(name=name):
                self._reports.pop(name, None)

    def _report(self, name: str) -> None:
        node, report = self._nodes.get(name), self._reports.get(name)
        if node is not None:
            self._recording.node_seen(node, report.status if report else None)


def record_to(file: Path, kubeconfig: str | None, context: str | None) -> None:
    """Record to the file until SIGINT or SIGTERM. If the file has a recording, continue it.

    Raises ``BadSettings`` if the file is not a recording, another process records to it, or no
    cluster is configured, and ``OSError`` if the file cannot be written.
    """
    with ExitStack() as stack:
        stack.enter_context(_alone(file))
        hint = "example: headroom plan record cluster.json --kubeconfig ~/.kube/config"
        configuration = load_configuration(kubeconfig, context, hint)
        api = stack.enter_context(closing(KubeApi(configuration)))
        now_s = time.time()
        new = Recording(started_s=now_s, until_s=now_s)
        _run(file, Recorder(read_recording(file) if file.exists() else new), api)


def _run(file: Path, recorder: Recorder, api: KubeApi) -> None:
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    reflectors = [Reflector(kind, api, recorder.deliver) for kind in kinds()]
    threads = [threading.Thread(target=each.run, daemon=True) for each in reflectors]
    for thread in threads:
        thread.start()
    next_s, begun, next_error_s = time.monotonic(), False, 0.0
    while not stopped.wait(_TICK_S):
        watches = [each.health for each in reflectors]
        ages = [each.contact_age_s for each in watches if each.synced]
        known = [age for age in ages if age is not None]
        if len(known) == len(reflectors):
            recorder.contact(time.time() - max(known))
            if not begun:
                sys.stderr.write(f"headroom: records {recorder.summary()} to {file} until Ctrl-C\n")
                begun = True
        error = next((each.error for each in watches if each.error), None)
        if error and time.monotonic() >= next_error_s:
            sys.stderr.write(f"headroom: the recording is incomplete while this fails: {error}\n")
            next_error_s = time.monotonic() + _EVERY_S
        if time.monotonic() >= next_s:
            took_s = _write(file, recorder.encoded())
            next_s = time.monotonic() + max(_EVERY_S, _DURATIONS * took_s)
    for each in reflectors:
        each.stop()
    _write(file, recorder.encoded())


def kinds() -> Iterator[Kind]:
    """Yield the kinds to watch. GPUNodes are optional, because node labels also show the GPUs."""
    for kind in watched_kinds("", lambda pod: asks_for_gpu(pod, RULES)):
        if kind.type is GPUNode:
            yield replace(kind, other_paths=(kind.path,))  # makes the kind optional
        elif kind.type in (Node, Pod):
            yield kind


def _write(file: Path, body: bytes) -> float:
    """Replace the file atomically, so it is complete even after a crash. Return how many seconds
    this took."""
    began_s = time.monotonic()
    new = file.with_name(f"{file.name}.new")
    with new.open("wb") as opened:
        opened.write(body)
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)
    return time.monotonic() - began_s


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold the lock of the file. Raise ``BadSettings`` if another process records to the file."""
    with _lock_of(file) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise BadSettings(
                f"{file}: another process records to it; use another file. {EXAMPLE}"
            ) from err
        yield


def _lock_of(file: Path) -> TextIO:
    try:
        return file.with_name(f"{file.name}.lock").open("w")
    except OSError as err:
        raise BadSettings(f"{file} cannot be written: {err.strerror}. {EXAMPLE}") from err
