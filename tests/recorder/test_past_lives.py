"""Tests runs from before the recorder, read from metrics: which count, and to which owner they
belong.
"""

import math
from typing import Any

import pytest

from headroom.contract.kube import OwnerReference
from headroom.contract.vramprofile import ProfileOwner
from headroom.core.recommend.lives import DAY_S, Ending, Life
from headroom.core.recommend.programs import Family, Program
from headroom.recorder.life_tracker import TrackedLife
from headroom.recorder.past_lives import Owner, PastLife, PastLives, past_lives
from headroom.recorder.profile_book import Owned
from headroom.runtime.metric_history import Sample
from headroom.runtime.promql import EVERY_CLUSTER as QUERIES
from tests.recorder.facts import GIB, HOUR_S, NOW_S, facts

MAX_LIVES = 200

GPU = {"UUID": "GPU-0", "modelName": "NVIDIA L4"}
#: Labels that kube-state-metrics uses.
LLM = {"namespace": "team", "pod": "llm-5d4f-abcde"}
REPLICA_SET = {"owner_kind": "ReplicaSet", "owner_name": "llm-5d4f"}


def answers(**given: list[tuple[dict[str, str], float]]) -> dict[str, list[Sample]]:
    """Return results for all queries, by default empty. ``_`` in the name of an argument stands for
    a space.
    """
    names = (*QUERIES.totals(14), *QUERIES.ended_lives, *QUERIES.peaks)
    found = {name: list[Sample]() for name in names}
    for name, samples in given.items():
        key = name.replace("_", " ")
        found[key if key in found else "oom-killed 1"] = [Sample(*each) for each in samples]
    return found


def peaks(
    metric: str = "peak",
    amount: float = 8 * GIB,
    began_s: float = NOW_S - 5 * HOUR_S,
    ended_s: float = NOW_S - 2 * HOUR_S,
    **labels: str,
) -> dict[str, list[tuple[dict[str, str], float]]]:
    given = {**GPU, **LLM, "container": "main", **labels}
    figures = (("most", amount), ("first", began_s), ("last", ended_s))
    return {f"{metric}_{figure}": [(given, value)] for figure, value in figures}


def both(*parts: dict[str, list[Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, samples in part.items():
            found[name] = [*found.get(name, []), *samples]
    return found


OWNED = {"owner": [(LLM | REPLICA_SET, 1.0)]}


def test_a_run_has_the_peak_of_the_agent_and_the_owner_of_kube_state_metrics() -> None:
    image = {"image": [({**LLM, "container": "main", "image_spec": "vllm:1"}, 1.0)]}
    (found,) = past_lives(answers(**both(peaks(), OWNED, image)), NOW_S)
    assert found.owner == Owner("team", "ReplicaSet", "llm-5d4f")
    assert (found.container, found.image, found.model) == ("main", "vllm:1", "NVIDIA L4")
    began_s, ended_s = NOW_S - 5 * HOUR_S, NOW_S - 2 * HOUR_S
    assert found.life == Life(8 * GIB, began_s, ended_s, Ending.COMPLETED)


@pytest.mark.parametrize("amount", [math.nan, math.inf, 1e308, -1.0])
def test_a_value_that_is_not_a_measurement_is_skipped(amount: float) -> None:
    bad = peaks("used", amount, pod="other")
    owner = {"owner": [({**LLM, "pod": "other"} | REPLICA_SET, 1.0)]}
    (found,) = past_lives(answers(**both(peaks(), OWNED, bad, owner)), NOW_S)
    assert found.life.peak_bytes == 8 * GIB


def test_the_largest_peak_of_all_days_and_devices_counts() -> None:
    later = peaks(amount=9 * GIB, began_s=NOW_S - 3 * HOUR_S)
    other = peaks(amount=10 * GIB, UUID="GPU-1")
    (found,) = past_lives(answers(**both(peaks(), later, other, OWNED)), NOW_S)
    assert found.life.peak_bytes == 10 * GIB
    assert found.life.started_s == NOW_S - 5 * HOUR_S


def test_a_new_dcgm_exporter_continues_the_run_in_bytes_under_another_name() -> None:
    """The exporter is upgraded to 4.9.0 while the pod runs."""
    began_s, upgraded_s, ended_s = (NOW_S - hours * HOUR_S for hours in (5, 4, 2))
    old = peaks("used", 6000.0, began_s, upgraded_s)
    new = peaks("used-bytes", 7000.0 * (1 << 20), upgraded_s, ended_s)
    for used, until_s, mib in (
        (old, upgraded_s, 6000),
        (both(old, new), ended_s, 7000),
        (both(peaks("used", 8000.0, began_s, upgraded_s), new), ended_s, 8000),
    ):
        (found,) = past_lives(answers(**both(used, OWNED)), NOW_S)
        assert found.life == Life(mib << 20, began_s, until_s, Ending.COMPLETED)


def test_labels_that_prometheus_renamed_are_read() -> None:
    renamed = {"namespace": "gpu-operator", "pod": "agent-x", "container": "agent"}
    labels = {f"exported_{name}": text for name, text in {**LLM, "container": "main"}.items()}
    (found,) = past_lives(answers(**both(peaks(**renamed, **labels), OWNED)), NOW_S)
    assert (found.owner.namespace, found.container) == ("team", "main")


@pytest.mark.parametrize(
    ("more", "ending"),
    [
        pytest.param({}, Ending.COMPLETED, id="deleted"),
        pytest.param({"failed": [(LLM, 1.0)]}, Ending.FAILED, id="failed"),
        # The pod never had this phase.
        pytest.param({"failed": [(LLM, 0.0)]}, Ending.COMPLETED, id="not failed"),
        pytest.param({"evicted": [(LLM, 1.0)], "failed": [(LLM, 1.0)]}, Ending.EVICTED),
        pytest.param({"oom": [({**LLM, "container": "main"}, 1.0)]}, Ending.OOM_KILLED),
        pytest.param({"oom": [({**LLM, "container": "side"}, 1.0)]}, Ending.COMPLETED),
    ],
)
def test_the_end_of_a_run_is_the_end_of_its_pod(more: dict[str, Any], ending: Ending) -> None:
    (found,) = past_lives(answers(**both(peaks(), OWNED, more)), NOW_S)
    assert found.life.ending is ending


def test_active_runs_and_pods_without_a_known_owner_are_skipped() -> None:
    assert past_lives(answers(**peaks()), NOW_S) == []
    running = peaks(ended_s=NOW_S - 60)
    assert past_lives(answers(**both(running, OWNED)), NOW_S) == []
    nothing = peaks(amount=0)
    assert past_lives(answers(**both(nothing, OWNED)), NOW_S) == []


def test_dcgm_exporter_counts_for_pods_without_a_peak_of_the_agent() -> None:
    used = peaks("used", 4096.0)
    (found,) = past_lives(answers(**both(used, OWNED)), NOW_S)
    assert found.life.peak_bytes == 4 * GIB
    (found,) = past_lives(answers(**both(used, peaks(), OWNED)), NOW_S)
    assert found.life.peak_bytes == 8 * GIB


def test_memory_of_a_shared_gpu_is_no_pods_peak() -> None:
    other = {"namespace": "team", "pod": "llm-5d4f-other"}
    owners = {"owner": [(LLM | REPLICA_SET, 1.0), (other | REPLICA_SET, 1.0)]}
    beside = peaks("used", began_s=NOW_S - 4 * HOUR_S, ended_s=NOW_S - 3 * HOUR_S, **other)
    assert past_lives(answers(**both(peaks("used"), beside, owners)), NOW_S) == []
    after = peaks("used", began_s=NOW_S - 2 * HOUR_S + 1, ended_s=NOW_S - HOUR_S, **other)
    assert len(past_lives(answers(**both(peaks("used"), after, owners)), NOW_S)) == 2
    elsewhere = peaks("used", **other, UUID="GPU-1")
    assert len(past_lives(answers(**both(peaks("used"), elsewhere, owners)), NOW_S)) == 2


def test_a_run_of_dcgm_exporter_that_began_before_the_window_is_partial() -> None:
    old = NOW_S - 14 * DAY_S + 60
    (found,) = past_lives(answers(**both(peaks("used", began_s=old), OWNED)), NOW_S)
    assert found.life.partial
    # This life is complete, because the agent's metric is the peak since the start of the
    # container.
    (found,) = past_lives(answers(**both(peaks(began_s=old), OWNED)), NOW_S)
    assert not found.life.partial


def past(
    peak_gib: int = 8, image: str = "", kind: str = "ReplicaSet", name: str = "llm-5d4f"
) -> PastLife:
    life = Life(peak_gib * GIB, NOW_S - HOUR_S, NOW_S, Ending.COMPLETED)
    return PastLife(Owner("team", kind, name), "main", image, "NVIDIA L4", life)


def running(kind: str = "ReplicaSet", name: str = "llm-5d4f", image: str = "vllm:1") -> Owned:
    program = Program("p1", Family.VLLM, image)
    controller = OwnerReference(api_version="x/v1", kind=kind, name=name, uid="c", controller=True)
    life = Life(GIB, NOW_S, NOW_S)
    pod = facts(controller=controller, programs={"main": program})
    return Owned(TrackedLife(pod, "main", "L4", program, life), ProfileOwner("Deployment", "llm"))


def claimed(lives: list[PastLife], of: Owned, *, is_new: bool = True) -> list[Owned]:
    kept = PastLives()
    kept.load(lives)
    return kept.claim([of], lambda _: is_new)


def test_runs_of_the_same_replica_set_belong_to_the_running_program() -> None:
    (found,) = claimed([past()], running())
    assert found.tracked.life == past().life
    assert (found.tracked.model, found.tracked.program.fingerprint) == ("NVIDIA L4", "p1")
    assert found.owner == ProfileOwner("Deployment", "llm")
    assert claimed([past()], running(name="llm-77aa")) == []


@pytest.mark.parametrize(("image", "count"), [("vllm:1", 1), ("vllm:2", 0), ("", 0)])
def test_runs_of_other_owners_require_the_same_image(image: str, count: int) -> None:
    lives = [past(image=image, kind="Job", name="train")]
    assert len(claimed(lives, running("Job", "train-20261125"))) == count


def test_past_runs_are_dropped_if_other_runs_are_already_recorded() -> None:
    assert claimed([past()], running(), is_new=False) == []


def test_past_runs_are_claimed_once() -> None:
    kept = PastLives()
    kept.load([past(), past(9)])
    assert len(kept) == 2
    assert len(kept.claim([running(), running()], lambda _: True)) == 2
    assert (len(kept), kept.claim([running()], lambda _: True)) == (0, [])


def test_the_newest_runs_of_a_container_are_kept() -> None:
    kept = PastLives()
    kept.load([past(1)] + [past(2)] * MAX_LIVES)
    found = kept.claim([running()], lambda _: True)
    assert {each.tracked.life.peak_bytes for each in found} == {2 * GIB}


def test_a_node_cannot_report_peaks_of_pods_on_other_nodes() -> None:
    requests = [({**LLM, "container": "main", "node": "gpu-1"}, 1.0)]
    for node, count in (("gpu-1", 1), ("gpu-2", 0)):
        given = both(peaks(node=node), OWNED, {"node": requests})
        assert len(past_lives(answers(**given), NOW_S)) == count


def test_devices_are_recognised_in_each_spelling_of_their_uuid() -> None:
    of = {"uuid": "GPU-1", "UUID": ""}
    (found,) = past_lives(answers(**both(peaks("used", 2048.0, **of), OWNED)), NOW_S)
    assert found.life.peak_bytes == 2 * GIB
