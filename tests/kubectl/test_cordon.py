"""Tests `kubectl headroom cordon` and `uncordon` with a fake API server and debug API."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headroom.contract.device_choice import STEERING_NOT_PERMITTED
from headroom.kubectl import cordon_commands
from headroom.kubectl.eviction import Clock
from tests.kubectl import bodies
from tests.kubectl.fake_cluster import FakeCluster, serving_fake, status
from tests.kubectl.transcripts import Shown, run

A = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
B = "GPU-bbbbbbbb-0000-4000-8000-000000000000"
ABSENT = "GPU-cccccccc-0000-4000-8000-000000000000"
NEXT = "the device plugin's next choice (fewest replicas in use)"
STEER = "kubectl annotate node gpu-a headroom.gpu/device-choice=steered"


def gpu(index: int, uuid: str, **others: Any) -> Any:
    """Return a device that the plugin could choose next."""
    return bodies.device(index, uuid=uuid, memory_id=uuid) | {
        "kind": "gpu",
        "policy": "distributed",
        "candidate": True,
        "candidate_because": NEXT,
        "cordoned": False,
        "hidden_holders": 0,
        "replicas_free": 4,
        "replicas_allocated": 0,
        **others,
    }


class Fake:
    """A fake cluster with one node that has two GPUs, and a command line for it."""

    def __init__(self, cluster: FakeCluster, kubeconfig: str) -> None:
        self.cluster, self._kubeconfig = cluster, kubeconfig
        self.slept: list[float] = []

    def run(self, *arguments: str, server: str | None = None, width: int | None = None) -> Shown:
        options = ["--kubeconfig", self._kubeconfig]
        return run(server or self.cluster.url, *options, *arguments, width=width)

    def add(self, *devices: Any, annotations: dict[str, str] | None = None, **node: Any) -> None:
        found = bodies.node("gpu-a", **node) | {"devices": [*devices]}
        self.cluster.add(found, annotations)

    def hold(self, *names: str, observed: bool = True) -> None:
        """Put pods with requests of 7 GiB on GPU 0."""
        pods = [bodies.holder(name, 7, 5, observed=observed) for name in names]
        self.cluster.debug["gpu-a"]["devices"][0]["holders"] = pods


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with serving_fake(tmp_path) as (cluster, kubeconfig):
        found = Fake(cluster, kubeconfig)
        found.add(gpu(0, A), gpu(1, B))
        now = [0.0]

        def sleep(seconds: float) -> None:
            found.slept.append(seconds)
            now[0] += seconds

        monkeypatch.setattr(cordon_commands, "CLOCK", Clock(lambda: now[0], sleep))
        yield found


PREVIEW = f"""\
GPU 0 of node gpu-a: {A}, NVIDIA H100 80GB
  HBM3
  1 pod on it stays:
    team-a/trainer: 7.0 GiB reserved
  lost: 4 free replicas, 80.0 GiB headroom
Node gpu-a takes no pods for nvidia.com/gpu while the device plugin could choose
  a cordoned GPU:
  {A}: the device plugin's next choice
    (fewest replicas in use)
  also lost, on 1 other GPU: 4 free replicas, 80.0 GiB headroom
To keep the other GPUs open, let Headroom choose the GPU of each pod:
  kubectl annotate node gpu-a headroom.gpu/device-choice=steered
"""


@pytest.mark.parametrize("given", [A, A[:8], "0"])
def test_cordon_shows_the_lost_memory_at_80_columns_and_annotates_the_node(
    fake: Fake, given: str
) -> None:
    fake.hold("trainer")
    shown = fake.run("cordon", "gpu-a", given, width=80)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == (f"{PREVIEW}node gpu-a: {A} (GPU 0) cordoned\n")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert fake.cluster.cordoned("gpu-a") == A
    assert fake.cluster.evicted == []
    again = fake.run("cordon", "gpu-a", given)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == f"node gpu-a: {A} (GPU 0) is already cordoned\n"


def test_a_dry_run_changes_nothing(fake: Fake) -> None:
    fake.hold("trainer")
    fake.cluster.add_pod("trainer")
    shown = fake.run("cordon", "gpu-a", "0", "--dry-run", "--evict", width=80)
    assert shown.stdout == (
        f"{PREVIEW.replace(' stays', '')}node gpu-a: {A} (GPU 0) would be cordoned\n  (dry run)\n"
        "pod team-a/trainer: would be evicted\n"
    )
    assert {each.split()[0] for each in fake.cluster.requests} == {"GET"}
    fake.cluster.annotations["gpu-a"] = {"headroom.gpu/cordon": A}
    shown = fake.run("uncordon", "gpu-a", "0", "--dry-run")
    assert shown.stdout == f"node gpu-a: {A} (GPU 0) would be uncordoned (dry run)\n"
    assert {each.split()[0] for each in fake.cluster.requests} == {"GET"}


@pytest.mark.parametrize("how", ["steered", "the last of its resource"])
def test_no_resource_is_closed_if_headroom_chooses_or_no_other_gpu_is_left(
    fake: Fake, how: str
) -> None:
    policy = "steered" if how == "steered" else "distributed"
    resource = "nvidia.com/other" if how == "the last of its resource" else "nvidia.com/gpu"
    certainty = "steered" if how == "steered" else "exact"
    other = gpu(1, B, policy=policy, resource=resource)
    fake.add(gpu(0, A, policy=policy), other, certainty=certainty)
    shown = fake.run("cordon", "gpu-a", "0").stdout
    assert shown.splitlines()[1:] == [
        "  no pod is on it",
        "  lost: 4 free replicas, 80.0 GiB headroom",
        f"node gpu-a: {A} (GPU 0) cordoned",
    ]


def test_a_gpu_that_the_plugin_could_choose_later_is_mentioned(fake: Fake) -> None:
    fake.add(gpu(0, A, candidate=False), gpu(1, B), annotations={"headroom.gpu/device-choice": "x"})
    lines = fake.run("cordon", "gpu-a", "0").stdout.splitlines()
    assert lines[3:6] == [
        "The device plugin does not choose a cordoned GPU next. While it could, node gpu-a takes "
        "no pods for nvidia.com/gpu.",
        "To keep the other GPUs open, let Headroom choose the GPU of each pod:",
        f"  {STEER} --overwrite",
    ]


def test_obstacles_to_steering_are_shown_before_it_is_suggested(fake: Fake) -> None:
    fake.cluster.steering_obstacle = STEERING_NOT_PERMITTED
    lines = fake.run("cordon", "gpu-a", "0").stdout.splitlines()
    assert lines[6:9] == [
        "To keep the other GPUs open, let Headroom choose the GPU of each pod:",
        f"  obstacle: {STEERING_NOT_PERMITTED}",
        f"  {STEER}",
    ]


def test_steering_is_not_suggested_for_unshared_gpus(fake: Fake) -> None:
    fake.add(gpu(0, A, sharing="none"), gpu(1, B, sharing="none"), certainty="steered")
    lines = fake.run("cordon", "gpu-a", "0").stdout.splitlines()
    assert lines[5:7] == [
        "  also lost, on 1 other GPU: 4 free replicas, 80.0 GiB headroom",
        "Headroom cannot choose GPUs that are not shared, so steering does not prevent this.",
    ]


def test_devices_that_already_take_no_pods_do_not_count_as_lost(fake: Fake) -> None:
    fake.add(gpu(0, A), gpu(1, B, unhealthy="unhealthy_device"), gpu(2, ABSENT))
    shown = fake.run("cordon", "gpu-a", "0", "1").stdout
    assert "lost: nothing, because it already takes no pods\n" in shown
    assert "also lost, on 1 other GPU: 4 free replicas, 80.0 GiB headroom\n" in shown
    assert fake.cluster.cordoned("gpu-a") == f"{A},{B}"


def test_other_uuids_stay_in_the_annotation_until_the_last_one_is_uncordoned(fake: Fake) -> None:
    other = {"a.b/c": "kept"}
    fake.add(gpu(0, A), gpu(1, B), annotations={"headroom.gpu/cordon": ABSENT, **other})
    assert fake.run("cordon", "gpu-a", "1").returncode == 0
    assert fake.cluster.cordoned("gpu-a") == f"{B},{ABSENT}"
    shown = fake.run("uncordon", "gpu-a", "0", B)
    assert shown.stdout == (
        f"node gpu-a: {A} (GPU 0) is not cordoned\nnode gpu-a: {B} (GPU 1) uncordoned\n"
    )
    assert fake.cluster.cordoned("gpu-a") == ABSENT
    # The annotation contains a UUID that no GPU of the node has.
    assert fake.run("uncordon", "gpu-a", ABSENT[:6]).returncode == 0
    assert fake.cluster.annotations["gpu-a"] == other
    again = fake.run("uncordon", "gpu-a", "1")
    assert (again.returncode, again.stdout) == (0, f"node gpu-a: {B} (GPU 1) is not cordoned\n")


def test_after_a_conflict_the_node_is_read_again(fake: Fake) -> None:
    fake.cluster.others.append(B)
    assert fake.run("cordon", "gpu-a", "0").returncode == 0
    assert fake.cluster.cordoned("gpu-a") == f"{A},{B}"
    fake.cluster.others.append(ABSENT)
    assert fake.run("uncordon", "gpu-a", "0").returncode == 0
    assert fake.cluster.cordoned("gpu-a") == ABSENT
    fake.cluster.others.extend([A] * 9)
    before = len(fake.cluster.requests)
    shown = fake.run("cordon", "gpu-a", "1")
    assert shown.returncode == 3
    assert "was not changed, because other clients changed it during each of 5" in shown.stderr
    assert sum(each.startswith("PATCH") for each in fake.cluster.requests[before:]) == 5
    assert fake.cluster.cordoned("gpu-a") == A


def test_unknown_names_are_rejected_with_the_existing_names(fake: Fake) -> None:
    cases = {
        ("gpu-x", "0"): "Headroom has no node gpu-x. Known nodes: gpu-a\n",
        ("gpu-a", "7"): f"node gpu-a has no GPU '7'. It has: {A} (GPU 0), {B} (GPU 1). Example: "
        f"kubectl headroom cordon gpu-a {A}\n",
        ("gpu-a", "GPU-"): f"'GPU-' is not unique on node gpu-a: 2 GPUs match: {A} (GPU 0), ",
        ("gpu-a", ""): "node gpu-a has no GPU ''. It has: ",
    }
    for given, text in cases.items():
        for command in ("cordon", "uncordon"):
            shown = fake.run(command, *given)
            assert (shown.returncode, shown.stdout) == (2, ""), given
            assert shown.stderr.startswith(f"kubectl headroom: {text}")
    del fake.cluster.annotations["gpu-a"]
    fake.cluster.annotations["cpu"], fake.cluster.versions["cpu"] = {}, 1
    shown = fake.run("cordon", "gpu-a", "0")
    assert shown.returncode == 2
    assert shown.stderr == "kubectl headroom: there is no node gpu-a. Known nodes: cpu\n"


def test_a_missing_permission_is_reported(fake: Fake) -> None:
    message = 'nodes "gpu-a" is forbidden: User "u" cannot patch resource "nodes"'
    fake.cluster.answers["PATCH", "/nodes/"] = status(403, message)
    shown = fake.run("cordon", "gpu-a", "0")
    assert shown.returncode == 3
    assert shown.stderr == (
        f"kubectl headroom: node gpu-a cannot be changed: {message}; you need a ClusterRole with "
        "{apiGroups: [''], resources: [nodes], verbs: [get, patch]}\n"
    )
    assert f"{A} (GPU 0) cordoned" not in shown.stdout


def test_without_the_debug_api_complete_uuids_are_cordoned_without_a_preview(fake: Fake) -> None:
    nowhere = "http://127.0.0.1:1"
    for given in ("0", A[:12]):
        shown = fake.run("cordon", "gpu-a", given, server=nowhere)
        assert shown.returncode == 2
        assert f"{given!r} is not a whole UUID" in shown.stderr
    shown = fake.run("cordon", "gpu-a", A, "--evict", server=nowhere)
    assert shown.returncode == 3
    assert "--evict needs the debug API" in shown.stderr
    assert fake.cluster.cordoned("gpu-a") is None
    shown = fake.run("cordon", "gpu-a", A, server=nowhere)
    assert (shown.returncode, shown.stdout) == (0, f"node gpu-a: {A} cordoned\n")
    assert shown.stderr.startswith("no preview: http://127.0.0.1:1 does not answer: ")
    assert fake.cluster.cordoned("gpu-a") == A
    shown = fake.run("uncordon", "gpu-a", A[:6], server=nowhere)
    assert (shown.returncode, shown.stdout) == (0, f"node gpu-a: {A} uncordoned\n")
    assert fake.cluster.annotations["gpu-a"] == {}


def test_an_invalid_annotation_stays_unchanged(fake: Fake) -> None:
    fake.cluster.annotations["gpu-a"] = {"headroom.gpu/cordon": "a b"}
    shown = fake.run("cordon", "gpu-a", "0")
    assert shown.returncode == 2
    assert "To remove it: kubectl annotate node gpu-a headroom.gpu/cordon-\n" in shown.stderr
    assert fake.cluster.cordoned("gpu-a") == "a b"


def test_an_index_cordons_all_mig_devices_of_a_gpu(fake: Fake) -> None:
    first, second = f"MIG-{A[4:]}", f"MIG-{B[4:]}"
    fake.add(gpu(0, first, kind="mig"), gpu(0, second, kind="mig"), gpu(1, B))
    fake.cluster.mig_parents |= {first: A, second: A}
    shown = fake.run("cordon", "gpu-a", "0")
    assert "  lost: 8 free replicas, 160.0 GiB headroom\n" in shown.stdout
    assert fake.cluster.cordoned("gpu-a") == A
    shown = fake.run("cordon", "gpu-a", first)
    assert shown.stdout == f"node gpu-a: {first} (GPU 0) is already cordoned\n"
    shown = fake.run("uncordon", "gpu-a", first)
    assert shown.returncode == 2
    assert shown.stderr.endswith(f"To uncordon that GPU: kubectl headroom uncordon gpu-a {A}\n")
    fake.cluster.annotations["gpu-a"] = {"headroom.gpu/cordon": f"{first},{B}"}
    assert fake.run("uncordon", "gpu-a", "0").returncode == 0
    assert fake.cluster.cordoned("gpu-a") == B


BUDGET = status(
    429,
    "Cannot evict pod as it would violate the pod's disruption budget.",
    causes=[{"reason": "DisruptionBudget", "message": "The disruption budget b needs 1 healthy"}],
)


def test_evict_evicts_the_pods_on_the_gpu_by_their_uids(fake: Fake) -> None:
    fake.cluster.add_pod("trainer")
    fake.cluster.add_pod("other")
    fake.hold("trainer")
    fake.cluster.debug["gpu-a"]["devices"][1]["holders"] = [bodies.holder("other", 7, 5)]
    shown = fake.run("cordon", "gpu-a", "0", "--evict")
    assert shown.returncode == 0
    assert shown.stdout.splitlines()[-2:] == [
        f"node gpu-a: {A} (GPU 0) cordoned",
        "pod team-a/trainer: evicted",
    ]
    (body,) = fake.cluster.evicted
    assert body["deleteOptions"]["preconditions"] == {"uid": "uid-trainer"}
    assert list(fake.cluster.pods) == ["other"]
    # All pods have already been evicted.
    again = fake.run("cordon", "gpu-a", "0", "--evict")
    assert (again.returncode, len(again.stdout.splitlines())) == (0, 1)


def test_a_disruption_budget_delays_an_eviction_until_the_timeout(fake: Fake) -> None:
    fake.cluster.add_pod("trainer")
    fake.hold("trainer")
    fake.cluster.evictions["trainer"] = deque([BUDGET, BUDGET])
    shown = fake.run("cordon", "gpu-a", "0", "--evict")
    assert shown.returncode == 0
    assert shown.stdout.splitlines()[-1] == "pod team-a/trainer: evicted"
    assert fake.slept == [5.0, 5.0, 5.0]
    fake.cluster.add_pod("trainer")
    fake.hold("trainer")
    fake.cluster.evictions["trainer"] = deque([BUDGET] * 9)
    shown = fake.run("cordon", "gpu-a", "0", "--evict", "--timeout", "12s")
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-1] == (
        "pod team-a/trainer: stays: The disruption budget b needs 1 healthy"
    )
    assert fake.slept[3:] == [5.0, 5.0, 2.0]
    assert list(fake.cluster.pods) == ["trainer"]


def test_pods_that_must_not_be_evicted_stay(fake: Fake) -> None:
    fake.cluster.add_pod("daemon", "DaemonSet")
    fake.cluster.add_pod("mirror", "Node", annotations={"kubernetes.io/config.mirror": "x"})
    fake.cluster.add_pod("bare", "")
    fake.cluster.add_pod("budgets")
    several = "This pod has more than one PodDisruptionBudget"
    fake.cluster.evictions["budgets"] = deque([status(500, several)])
    fake.hold("daemon", "mirror", "bare", "budgets")
    shown = fake.run("cordon", "gpu-a", "0", "--evict")
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-4:] == [
        "pod team-a/daemon: stays: it belongs to DaemonSet o, which would create it again on this "
        "node",
        "pod team-a/mirror: stays: it is a mirror pod: remove its manifest from the node's kubelet",
        "pod team-a/bare: stays: it has no controller that would create it again; --force evicts "
        "it",
        f"pod team-a/budgets: stays: {several}",
    ]
    assert len(fake.cluster.evicted) == 1
    forced = fake.run("cordon", "gpu-a", "0", "--evict", "--force")
    assert forced.returncode == 1
    assert forced.stdout.splitlines()[-2:] == [
        "pod team-a/bare: evicted",
        "pod team-a/budgets: evicted",
    ]
    assert sorted(fake.cluster.pods) == ["daemon", "mirror"]


def test_a_pod_is_evicted_only_if_a_report_shows_it_on_the_gpu(fake: Fake) -> None:
    fake.cluster.add_pod("unconfirmed")
    fake.hold("unconfirmed", observed=False)
    shown = fake.run("cordon", "gpu-a", "0", "--evict", "--timeout", "5s")
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-1] == (
        "pod team-a/unconfirmed: stays: no report shows yet whether it is on this GPU"
    )
    assert fake.cluster.evicted == []


def test_a_new_pod_of_the_same_name_is_not_evicted(fake: Fake) -> None:
    fake.cluster.add_pod("trainer", uid="another")
    fake.hold("trainer")
    shown = fake.run("cordon", "gpu-a", "0", "--evict", "--timeout", "5s")
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-1] == "pod team-a/trainer: evicted, but has not ended yet"
    assert fake.cluster.evicted == []


def test_a_missing_permission_to_evict_is_reported(fake: Fake) -> None:
    fake.cluster.add_pod("trainer")
    fake.hold("trainer")
    fake.cluster.answers["POST", "/eviction"] = status(403, "cannot create pods/eviction")
    shown = fake.run("cordon", "gpu-a", "0", "--evict")
    assert shown.returncode == 3
    assert shown.stderr.startswith(
        "kubectl headroom: pod team-a/trainer cannot be evicted: cannot create pods/eviction; you "
        "need a ClusterRole with {apiGroups: [''], resources: [pods], verbs: [get]} and "
    )
    assert fake.cluster.cordoned("gpu-a") == A


@pytest.mark.parametrize("options", [["--force"], ["--evict", "--timeout", "soon"]])
def test_invalid_options_change_nothing(fake: Fake, options: list[str]) -> None:
    assert fake.run("cordon", "gpu-a", "0", *options).returncode == 2
    assert fake.cluster.requests == []
