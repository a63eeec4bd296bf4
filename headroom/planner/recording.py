"""The pods and nodes with GPUs of a cluster, as they are observed over time.

A recording is one value, which is written to a file, and continued from the file after a restart.
If there are more than ``MOST_PODS`` pods, the pods that ended first are dropped and counted. Times
are Unix times in seconds.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.kube import Node, Pod
from headroom.core.journal.dump import Inputs
from headroom.errors import BadSettings
from headroom.planner.api_objects import Use, gpu_pod, machine_of, uses_of
from headroom.planner.wording import plural, skipped
from headroom.planner.workload import History, Life, Machine

FORMAT = "headroom.gpu/recording/v1alpha1"
EXAMPLE = "Example: headroom plan record cluster.json"
MOST_PODS, MOST_GAPS = 200_000, 1000
#: Ratio of ``MOST_PODS`` that is dropped at a time.
_DROPPED_RATIO = 0.01
#: A shorter time without contact is not listed, because a watch reports only about once a minute.
GAP_S = 120.0
#: The pods of a snapshot are assumed to run together for this time.
_MOMENT_S = 3600.0
_SHORTEST_S = 1.0


class RecordedPod(msgspec.Struct):
    """A pod with a GPU that was bound to a node."""

    name: str
    workload: str
    node: str
    created_s: float
    started_s: float
    gpus: int
    #: GPU memory that the pod requests on one device, or None if it requests no amount in bytes.
    request_bytes: int | None = None
    cpu_milli: int = 0
    host_bytes: int = 0
    #: When the pod ended, or None while it runs.
    ended_s: float | None = None
    #: Maximum memory that the pod used on one device, or None if it was not measured.
    peak_bytes: int | None = None
    #: Sum and number of the observed SM activities, and of the observed GPU utilizations.
    sm_sum: float = 0.0
    sm_count: int = 0
    utilization_sum: float = 0.0
    utilization_count: int = 0

    def add_use(self, use: Use) -> None:
        if use.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, use.peak_bytes)
        if use.sm_ratio is not None:
            self.sm_sum, self.sm_count = self.sm_sum + use.sm_ratio, self.sm_count + 1
        if use.utilization_ratio is not None:
            self.utilization_sum += use.utilization_ratio
            self.utilization_count += 1


class RecordedNode(msgspec.Struct):
    """The fields of a ``Machine`` except its name."""

    model: str
    gpus: int
    memory_bytes: int
    cpu_milli: int | None = None
    host_bytes: int | None = None


class Gap(msgspec.Struct, frozen=True):
    """A period in which nothing was observed."""

    from_s: float
    until_s: float


class Recording(msgspec.Struct):
    """Observed pods and nodes. ``now_s`` in its methods is the time of the observation."""

    started_s: float
    #: The time of the last contact with the API server.
    until_s: float
    format: str = FORMAT
    #: The pods by uid.
    pods: dict[str, RecordedPod] = {}  # msgspec copies defaults
    nodes: dict[str, RecordedNode] = {}
    gaps: list[Gap] = []
    #: Number of pods that were dropped because there were too many.
    dropped: int = 0

    def pod_seen(self, pod: Pod, now_s: float) -> None:
        """Record a pod that is bound and requests a GPU, and when it ended."""
        uid = pod.metadata.uid
        known = self.pods.get(uid)
        if known is None and pod.node and (found := gpu_pod(pod, now_s)) is not None:
            known = self.pods[uid] = RecordedPod(**found)
            self._limit_pods()
        if known is not None and known.ended_s is None and pod.ended:
            known.ended_s = now_s

    def pod_gone(self, uid: str, now_s: float) -> None:
        if (known := self.pods.get(uid)) is not None and known.ended_s is None:
            known.ended_s = now_s

    def pods_listed(self, uids: Collection[str], now_s: float) -> None:
        """End the pods that are missing in a complete list. They count as ended at the last
        contact."""
        for uid, pod in self.pods.items():
            if pod.ended_s is None and uid not in uids:
                pod.ended_s = max(pod.started_s, self.until_s)
        if now_s - self.until_s > GAP_S:
            self.gaps = [*self.gaps, Gap(self.until_s, now_s)][-MOST_GAPS:]
        self.contact(now_s)

    def node_seen(self, node: Node, status: GPUNodeStatus | None) -> None:
        """Record a node's GPUs from its report, or else from its labels, and the use of its pods.

        Nodes without GPUs, and nodes with GPUs of unknown memory, are left out.
        """
        machine = machine_of(node, status)
        if machine is not None:
            fields = {each: getattr(machine, each) for each in RecordedNode.__struct_fields__}
            self.nodes[machine.name] = RecordedNode(**fields)
        for uid, use in uses_of(status).items() if status else ():
            if (pod := self.pods.get(uid)) is not None:
                pod.add_use(use)

    def contact(self, now_s: float) -> None:
        self.until_s = max(self.until_s, now_s)

    def _limit_pods(self) -> None:
        if len(self.pods) > MOST_PODS:
            ended = sorted(self.pods, key=lambda uid: self.pods[uid].ended_s or float("inf"))
            for uid in ended[: max(1, int(MOST_PODS * _DROPPED_RATIO))]:
                del self.pods[uid]
                self.dropped += 1


def read_recording(file: Path) -> Recording:
    """Return the recording in a file. Raises ``BadSettings`` if the file is not a recording, and
    ``OSError`` if it cannot be read."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Recording)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise BadSettings(f"{file}: is not a recording: {err}. {EXAMPLE}") from err
    if found.format != FORMAT:
        raise BadSettings(f"{file}: its format is {found.format!r}, not {FORMAT!r}. {EXAMPLE}")
    return found


def history_of(recording: Recording, moment: bool = False) -> History:
    """Return the history of a recording. If ``moment`` is true, it shows the pods of one moment.

    Raises ``BadSettings`` if it has no node or no pod with a GPU.
    """
    machines = tuple(
        Machine(name=name, **msgspec.structs.asdict(node))
        for name, node in sorted(recording.nodes.items())
    )
    if not machines:
        raise BadSettings(
            "it has no node with GPUs of known memory: Headroom's agent must report the memory, or "
            "GPU feature discovery must label the node. Example: nvidia.com/gpu.memory"
        )
    names = {machine.name for machine in machines}
    pods = [pod for pod in recording.pods.values() if pod.node in names]
    if moment:
        pods = [pod for pod in pods if pod.ended_s is None]
    if not pods:
        raise BadSettings("it has no pod with a GPU on these nodes")
    lives = sorted((_life(pod, recording, moment) for pod in pods), key=lambda each: each.created_s)
    elsewhere = [
        f"{pod.name} on {pod.node}"
        for pod in recording.pods.values()
        if pod.node not in names and not (moment and pod.ended_s is not None)
    ]
    left_out = skipped("pod", "on nodes whose GPUs are unknown", elsewhere)
    notes = tuple(_notes(recording, pods, moment))
    return History(machines, tuple(lives), notes, skipped=left_out)


def history_of_snapshot(inputs: Inputs) -> History:
    """Return the history of a snapshot of the debug API. Raises the same errors as
    ``history_of``."""
    # The times do not matter, because all pods are assumed to run together.
    recording = Recording(started_s=0.0, until_s=0.0)
    for pod in inputs.pods:
        recording.pod_seen(pod, 0.0)
    for facts in inputs.nodes:
        if facts.node is not None:
            recording.node_seen(facts.node, facts.gpunode.status if facts.gpunode else None)
    return history_of(recording, moment=True)


def _life(pod: RecordedPod, recording: Recording, moment: bool) -> Life:
    created_s = max(0.0, pod.created_s - recording.started_s)
    started_s = max(created_s, pod.started_s - recording.started_s)
    ended_s = (recording.until_s if pod.ended_s is None else pod.ended_s) - recording.started_s
    return Life(
        name=pod.name,
        workload=pod.workload,
        created_s=0.0 if moment else created_s,
        run_s=_MOMENT_S if moment else max(_SHORTEST_S, ended_s - started_s),
        gpus=pod.gpus,
        request_bytes=pod.request_bytes,
        peak_bytes=pod.peak_bytes,
        sm_ratio=_mean(pod.sm_sum, pod.sm_count),
        utilization_ratio=_mean(pod.utilization_sum, pod.utilization_count),
        cpu_milli=pod.cpu_milli,
        host_bytes=pod.host_bytes,
    )


def _mean(ratio_sum: float, count: int) -> float | None:
    return min(1.0, ratio_sum / count) if count else None


def _notes(recording: Recording, pods: list[RecordedPod], moment: bool) -> Iterator[str]:
    if moment:
        yield "The snapshot shows one moment: its pods are replayed as if all were created at once."
    else:
        before = sum(pod.created_s < recording.started_s for pod in pods)
        running = sum(pod.ended_s is None for pod in pods)
        if before:
            yield (
                f"{plural(before, 'pod')} began before the recording, and only the time in it "
                "counts."
            )
        if running:
            yield (
                f"{plural(running, 'pod')} still ran at the end of the recording, which counts as "
                "the end."
            )
    if recording.gaps:
        hours = sum(gap.until_s - gap.from_s for gap in recording.gaps) / 3600
        yield (
            f"Nothing was recorded in {plural(len(recording.gaps), 'gap')}, {hours:.1f} h in "
            "total. Pods that began and ended in a gap are missing, and others count as ended at "
            "its beginning."
        )
    if recording.dropped:
        yield (
            f"{recording.dropped:,} pods were dropped, because a recording has at most "
            f"{MOST_PODS:,}."
        )
    unmeasured = sum(pod.peak_bytes is None for pod in pods)
    if unmeasured:
        yield (
            f"{unmeasured:,} of {len(pods):,} pods have no measured peak, so their request, or a "
            "whole GPU, is taken as their peak."
        )
