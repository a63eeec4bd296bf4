"""Tests how the checkpoint and PodResources are joined, also for pods that only one of the
two has.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.probes.checkpoint import Entry
from agent.probes.kubelet import KubeletProbe, join
from agent.probes.podresources import ListedContainer, PodResources, Unanswered
from agent.probes.readings import HoldingReading, RegisteredReading, SourceReading
from tests.agent.records import GPU, entry, record

SETTLED_AFTER_S = 10.0
VERIFY_EVERY_S = 300.0


def listed(pod: str, *replicas: str, container: str = "main", **more: Any) -> ListedContainer:
    return ListedContainer("ns", pod, container, {GPU: frozenset(replicas)} if replicas else {})


def held(uid: str, *replicas: str, container: str = "main") -> Entry:
    return Entry(uid, container, GPU, replicas)


def test_names_and_uids_are_matched_by_the_replicas() -> None:
    joined = join([held("u", "a", "b"), held("v", "c")], [listed("p", "b", "a"), listed("q")], {})
    assert [(h.uid, h.name, h.replica) for h in joined.holdings] == [
        ("u", "p", "a"),
        ("u", "p", "b"),
        ("v", "", "c"),
    ]
    assert joined.unlisted == {"v"}


def test_the_entry_of_an_unlisted_init_container_belongs_to_its_pod() -> None:
    joined = join([held("u", "a", container="first"), held("u", "a")], [listed("p", "a")], {})
    assert [(h.name, h.container) for h in joined.holdings] == [("p", "first"), ("p", "main")]
    assert joined.unlisted == frozenset()


def test_two_pods_of_the_same_name_have_their_own_entries() -> None:
    joined = join([held("old", "a"), held("new", "b")], [listed("p", "b")], {"old": ("ns", "p")})
    assert [(h.uid, h.name) for h in joined.holdings] == [("old", "p"), ("new", "p")]
    assert joined.unlisted == {"old"}
    assert not joined.ambiguous


def test_an_ambiguous_pod_is_not_guessed() -> None:
    joined = join([held("u", "a"), held("v", "a")], [listed("p", "a")], {})
    assert joined.ambiguous
    assert {(h.uid, h.name) for h in joined.holdings} == {("u", ""), ("v", "")}


def test_pods_missing_from_the_checkpoint_are_reported_without_a_uid() -> None:
    joined = join([], [listed("p", "a")], {})
    assert joined.unwritten
    assert [(h.uid, h.name, h.source) for h in joined.holdings] == [("", "p", "podresources")]


class Service(PodResources):
    """A PodResources client with a scripted response. None means that the kubelet does not
    respond.
    """

    def __init__(self) -> None:
        super().__init__("")
        self.containers_now: list[ListedContainer] | None = []
        self.healthy_now: dict[str, frozenset[str]] | None = {}

    def containers(self) -> list[ListedContainer]:
        if self.containers_now is None:
            raise Unanswered("kubelet does not answer List: RESOURCE_EXHAUSTED")
        return self.containers_now

    def healthy(self) -> dict[str, frozenset[str]]:
        if self.healthy_now is None:
            raise Unanswered("kubelet does not answer GetAllocatableResources: UNIMPLEMENTED")
        return self.healthy_now


class ProbedKubelet:
    """A kubelet probe whose clock the test sets."""

    def __init__(self, folder: Path, cgroups: Path | None = None) -> None:
        self.now_s = 0.0
        self.file = folder / "checkpoint"
        self.socket = folder / "socket"
        self.socket.touch()
        self.service = Service()
        self.age_s = 1e9
        self.probe = KubeletProbe(
            self.file,
            self.socket,
            self.service,
            lambda: self.now_s,
            lambda: self.socket.stat().st_ctime_ns / 1e9 + self.age_s,
            cgroups=cgroups,
        )

    def restart_kubelet(self) -> None:
        self.socket.rename(self.socket.with_suffix(".old"))
        self.socket.touch()
        self.age_s = 0.0

    def write(self, *entries: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(record(*entries)))

    def uids(self) -> list[str]:
        return [r.uid for r in self.probe.read() if isinstance(r, HoldingReading)]

    def message(self) -> str:
        rows = [r for r in self.probe.read() if isinstance(r, SourceReading)]
        return next(r.message for r in rows if r.source == "podresources")


@pytest.fixture
def world(tmp_path: Path) -> ProbedKubelet:
    return ProbedKubelet(tmp_path)


def test_a_pod_that_a_settled_kubelet_does_not_list_has_ended(world: ProbedKubelet) -> None:
    world.write(entry("u"), entry("v", DeviceIDs={"-1": ["GPU-a::1"]}))
    world.service.containers_now = [listed("p", "GPU-a::1")]
    assert world.uids() == ["v"]
    assert world.message() == ""


@pytest.mark.parametrize("young", [True, False], ids=["started just now", "lists no pods"])
def test_a_starting_kubelet_gets_time_to_list_its_pods(world: ProbedKubelet, young: bool) -> None:
    world.write(entry("u"))
    if young:
        world.restart_kubelet()
        world.service.containers_now = [listed("other")]
    for now_s in (0.0, SETTLED_AFTER_S - 0.1):
        world.now_s = now_s
        assert world.uids() == ["u"]
        assert "still count as running" in world.message()
    world.now_s = SETTLED_AFTER_S
    assert world.uids() == []
    assert world.message() == ""


_UID, _OTHER = "0f3a1b2c-8d4e-4f5a-9b6c-7d8e9f0a1b2c", "2" * 32


@pytest.mark.parametrize(
    "form",
    [
        "kubepods.slice/kubepods-pod{}.slice",
        "kubepods/besteffort/pod{}",
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        "kubelet-kubepods-burstable-pod{}.slice",
        "pids/kubepods/pod{}",
    ],
)
def test_a_pod_that_is_never_listed_runs_while_it_has_a_cgroup(tmp_path: Path, form: str) -> None:
    """PodResources never lists the pod, because only its init container requests a GPU."""
    world = ProbedKubelet(tmp_path, tmp_path / "cgroup")
    is_systemd = form.endswith(".slice")
    folder = tmp_path / "cgroup" / form.format(_UID.replace("-", "_") if is_systemd else _UID)
    folder.mkdir(parents=True)
    (folder.parent / "kubepods-not-a-pod").mkdir()
    world.write(entry(_UID, ContainerName="warmup"), entry(_OTHER, DeviceIDs=["GPU-a::1"]))
    world.service.containers_now = [ListedContainer("ns", "p", "main", {})]
    assert world.uids() == [_UID, _OTHER]  # The other pod may have just been admitted.
    for world.now_s in (SETTLED_AFTER_S, 1e6):
        assert world.uids() == [_UID]
        assert world.message() == ""
    world.restart_kubelet()
    assert _UID in world.uids()
    world.age_s = 1e9
    folder.rmdir()
    world.now_s += 1.0
    assert world.uids() == []


def test_a_new_pod_gets_time_until_it_has_a_cgroup(tmp_path: Path) -> None:
    world = ProbedKubelet(tmp_path, tmp_path)
    other = tmp_path / f"kubepods/pod{_OTHER}"
    other.mkdir(parents=True)
    world.write(entry(_UID))
    world.service.containers_now = [listed("other")]
    assert world.uids() == [_UID]
    assert "still count as running" in world.message()
    other.with_name(f"pod{_UID}").mkdir()
    world.now_s = SETTLED_AFTER_S
    assert (world.uids(), world.message()) == ([_UID], "")


def test_a_formerly_listed_pod_ends_at_once_even_if_its_cgroup_remains(tmp_path: Path) -> None:
    """The cgroup remains, because the kubelet removes it only after it has unmounted the pod's
    volumes.
    """
    world = ProbedKubelet(tmp_path, tmp_path)
    (tmp_path / f"kubepods/pod{_UID}").mkdir(parents=True)
    world.write(entry(_UID))
    world.service.containers_now = [listed("p", "GPU-a::0")]
    assert world.uids() == [_UID]
    world.service.containers_now = [listed("other")]
    assert world.uids() == []


def test_a_listed_pod_has_ended_when_its_cgroup_is_removed(tmp_path: Path) -> None:
    """Kubelet 1.31 lists the last admitted pod until it admits another pod."""
    world = ProbedKubelet(tmp_path, tmp_path)
    folder = tmp_path / f"kubepods/burstable/pod{_UID}"
    (tmp_path / f"kubepods/pod{_OTHER}").mkdir(parents=True)
    world.write(entry(_UID), entry(_OTHER, DeviceIDs={"-1": ["GPU-a::1"]}))
    world.service.containers_now = [listed("p", "GPU-a::0"), listed("other", "GPU-a::1")]
    for world.now_s in (0.0, 1e6):
        assert world.uids() == [
            _UID,
            _OTHER,
        ]  # The sandbox of the pod may be waiting for the network.
    folder.mkdir(parents=True)
    assert world.uids() == [_UID, _OTHER]
    moved = folder.rename(tmp_path / f"kubepods/pod{_UID}")
    assert world.uids() == [_UID, _OTHER]
    moved.rmdir()
    for _ in range(2):
        assert world.uids() == [_OTHER]
        assert world.message() == ""
    world.restart_kubelet()
    world.service.containers_now = [listed("other", "GPU-a::1")]
    assert world.uids() == [
        _OTHER
    ]  # This holds even if a starting kubelet might list the pod later.
    world.service.containers_now = None
    assert world.uids() == [_OTHER]
    world.write(entry(_OTHER, DeviceIDs={"-1": ["GPU-a::1"]}))
    world.service.containers_now = [listed("other", "GPU-a::1")]
    assert world.uids() == [_OTHER]


def test_without_cgroups_the_report_shows_which_pods_may_be_missed(tmp_path: Path) -> None:
    world = ProbedKubelet(tmp_path, tmp_path / "none")
    world.write(entry(_UID))
    world.service.containers_now = [listed("other")]
    assert world.uids() == []
    assert "mount the host's /sys/fs/cgroup there" in world.message()


def test_a_kubelet_that_does_not_answer_ends_no_pod(world: ProbedKubelet) -> None:
    world.write(entry("u"))
    assert world.uids() == ["u"]  # The list may be incomplete, because it contains no pod.
    world.service.containers_now = None
    for now_s in (1.0, 1e6):
        world.now_s = now_s
        assert world.uids() == ["u"]
    assert "RESOURCE_EXHAUSTED" in world.message()
    world.service.containers_now = []
    assert world.uids() == ["u"]  # The waiting time starts with the next response.


def test_a_newly_listed_pod_is_looked_up_in_the_checkpoint_again(world: ProbedKubelet) -> None:
    """The pod was admitted between the read of the checkpoint and the read of PodResources."""
    world.write()
    admitted = entry("u")

    class Admitting(Service):
        def containers(self) -> list[ListedContainer]:
            world.write(admitted)
            return [listed("p", "GPU-a::0")]

    world.probe = KubeletProbe(world.file, world.socket, Admitting())
    (holding,) = [r for r in world.probe.read() if isinstance(r, HoldingReading)]
    assert (holding.uid, holding.name) == ("u", "p")


def test_a_restart_resets_the_waiting_time_and_keeps_names(world: ProbedKubelet) -> None:
    world.write(entry("u"))
    world.service.containers_now = [listed("p", "GPU-a::0")]
    assert world.uids() == ["u"]
    world.restart_kubelet()
    world.service.containers_now = []
    world.now_s = 1e6
    (holding,) = [r for r in world.probe.read() if isinstance(r, HoldingReading)]
    assert (holding.uid, holding.name) == ("u", "p")


def test_healthy_replicas_come_from_the_kubelet_or_else_from_the_checkpoint(
    world: ProbedKubelet,
) -> None:
    world.write(entry("u"))

    def healthy() -> dict[str, tuple[str, frozenset[str]]]:
        found = [r for r in world.probe.read() if isinstance(r, RegisteredReading)]
        return {r.resource: (r.source, r.healthy) for r in found}

    world.service.healthy_now = {"nvidia.com/other": frozenset({"x"})}
    assert healthy() == {
        GPU: ("podresources", frozenset()),  # The plugin is not running.
        "nvidia.com/other": ("podresources", frozenset({"x"})),
    }
    world.service.healthy_now = None
    assert healthy() == {GPU: ("checkpoint", frozenset({"GPU-a::0"}))}
    assert "UNIMPLEMENTED" in world.message()


def test_a_socket_without_a_server_is_reported_within_the_deadline(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    socket.touch()
    probe = KubeletProbe(tmp_path / "none", socket, PodResources(str(socket), timeout_s=0.5))
    rows = {r.source: r for r in probe.read() if isinstance(r, SourceReading)}
    assert rows["podresources"].state == "degraded"
    assert "kubelet does not answer List" in rows["podresources"].message
    assert rows["checkpoint"].state == "absent"
