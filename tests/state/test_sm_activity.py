"""Checks that for the SM activity of a device, fresh history takes precedence over the agent's
sample.
"""

import msgspec
import pytest

from headroom.contract.dcgm import Key
from headroom.contract.gpunode import Device, SmActivity
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, NodeGone
from headroom.core.cluster.changes import ActivitySeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.sm_activity import key_of
from headroom.core.placement.device_reading import Activity
from headroom.core.placement.explain import explain
from headroom.core.placement.explanation_text import explanation_lines
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Weights
from tests.builders import (
    NOW_S,
    device,
    gpunode,
    kube_node,
    mig,
    pod,
    request,
    reservation,
    shared,
)
from tests.state.states import EPOCH_S, seen, state_of

HISTORY = "dcgm-history"

BUSY = SmActivity(0.8, "gpm")
SMALL = pod("1Gi", annotations={"headroom.gpu/max-sm": "50%"})


def history(ratio: float, sampled_at_s: float = NOW_S - 20) -> Activity:
    return Activity(ratio, HISTORY, 0.95, 900.0, sampled_at_s)


def brings(state: ClusterWriter, figures: dict[Key, Activity], *nodes: str) -> None:
    state.apply([ActivitySeen(figures, nodes)])


def node_with(*devices: Device, version: str = "1") -> ClusterWriter:
    return state_of(*seen(kube_node(), gpunode(*devices, version=version)))


def counts(state: ClusterWriter) -> list[tuple[float, str] | None]:
    (node,) = state.cluster.snapshot().nodes
    found = [None if t.activity is None else (t.activity.ratio, t.activity.source)
             for t in node.devices]  # fmt: skip
    ppm = [-1 if each is None else round(each[0] * 1e6) for each in found]
    assert state.cluster.snapshot().columns.sm_ppm[0].tolist() == ppm
    return found


def test_history_takes_precedence_over_the_agents_sample() -> None:
    state = node_with(shared("A", sm_activity=BUSY), shared("B"))
    assert counts(state) == [(0.8, "gpm"), None]
    brings(state, {("A", None): history(0.1), ("B", None): history(0.2)}, "n")
    assert counts(state) == [(0.1, HISTORY), (0.2, HISTORY)]
    state.apply(seen(gpunode(shared("A", sm_activity=BUSY), shared("B"), version="2")))
    assert counts(state) == [(0.1, HISTORY), (0.2, HISTORY)]
    brings(state, {("B", None): history(0.2)}, "n")
    assert counts(state) == [(0.8, "gpm"), (0.2, HISTORY)]
    brings(state, {}, "n")
    assert counts(state) == [(0.8, "gpm"), None]


def test_history_that_arrives_before_its_node_counts_later() -> None:
    state = state_of()
    brings(state, {("A", None): history(0.1)})
    state.apply(seen(kube_node(), gpunode(device("A"))))
    assert counts(state) == [(0.1, HISTORY)]


def test_a_mig_device_has_the_history_of_its_gpu_instance() -> None:
    state = node_with(mig("M1", 3, "G"), mig("M2", 4, "G"), mig("M3", 4, "G"))
    brings(state, {("G", 3): history(0.3), ("G", 4): history(0.4), ("G", None): history(1)}, "n")
    assert counts(state) == [(0.3, HISTORY), (0.4, HISTORY), (0.4, HISTORY)]
    assert key_of(msgspec.structs.replace(mig("M", 0), gpu_instance=None)) == ("M", None)


def test_new_history_weighs_no_node_and_changes_no_earlier_snapshot() -> None:
    state = node_with(shared("A", sm_activity=BUSY))
    first = state.cluster.snapshot()
    (weighed,) = first.nodes[0].devices
    brings(state, {("A", None): history(0.1)}, "n")
    second = state.cluster.snapshot()
    assert second.generation > first.generation
    assert second.changed_in[0] == second.updated_in[0] == second.generation
    assert second.nodes[0].devices[0].holders is weighed.holders
    assert second.columns.free_bytes is first.columns.free_bytes
    assert first.columns.sm_ppm.tolist() == [[800_000]]
    assert first.nodes[0].devices[0].activity.ratio == 0.8


def test_only_nodes_with_the_given_names_are_checked() -> None:
    state = node_with(shared("A", sm_activity=BUSY))
    before = state.cluster.snapshot()
    brings(state, {("X", None): history(0.1)}, "who", "nobody")
    brings(state, {})
    assert state.cluster.snapshot() is before


def test_a_gpu_is_found_on_the_last_node_that_reported_it() -> None:
    state = node_with(shared("A"), mig("M", 1, "G"))
    find = state.cluster.activities.node_of
    assert [find(("A", None)), find(("G", 7)), find(("X", None))] == ["n", "n", None]
    other = gpunode(shared("A"), name="other")
    state.apply([*seen(kube_node("other")), GPUNodeSeen(other, NOW_S)])
    assert find(("A", None)) == "other"
    state.apply(seen(gpunode(shared("B"), version="2")))  # A stays on its node.
    assert [find(("A", None)), find(("B", None)), find(("G", 1))] == ["other", "n", None]
    state.apply([NodeGone("n"), GPUNodeGone("n")])
    assert find(("B", None)) is None


def test_history_requeues_pods_that_wait_for_lower_sm_activity() -> None:
    state = node_with(shared("A"))
    state.apply(seen(SMALL))
    generation = state.cluster.snapshot().generation
    brings(state, {("A", None): history(0.7)}, "n")
    assert state.cluster.latest_gain > generation  # Its activity has become known.
    state.cluster.snapshot()
    brings(state, {("A", None): history(0.8)}, "n")
    busier = state.cluster.snapshot().generation
    assert state.cluster.latest_gain < busier
    brings(state, {("A", None): history(0.3)}, "n")
    assert state.cluster.latest_gain > busier


@pytest.mark.parametrize(
    ("figures", "sample", "reason", "line"),
    [
        pytest.param(
            {("A", None): history(0.3)}, BUSY, None,
            "SM activity 30 %, the 0.95 quantile of 15 minutes in DCGM's history; "
            "the pod requires less than 50 %",
            id="history is below, the sample is not",
        ),
        pytest.param(
            {("A", None): history(0.6)}, SmActivity(0.1, "gpm"), Reason.SM_ABOVE_LIMIT,
            "SM activity 60 %, the 0.95 quantile of 15 minutes in DCGM's history; "
            "the pod requires less than 50 %",
            id="history is above, the sample is not",
        ),
        pytest.param(
            {}, SmActivity(0.125, "nvml-process"), None,
            "SM activity 12.5 %, the last sample of the node's agent (nvml-process); "
            "the pod requires less than 50 %",
            id="no history",
        ),
        pytest.param(
            {}, SmActivity(0.1, "nvml"), Reason.SM_ABOVE_LIMIT,
            "SM activity is unknown; the pod requires less than 50 %",
            id="device utilisation",
        ),
    ],
)  # fmt: skip
def test_the_limit_applies_to_the_activity_that_the_explanation_shows(
    figures: dict[Key, Activity], sample: SmActivity, reason: Reason | None, line: str
) -> None:
    state = node_with(device("A", sm_activity=sample))
    brings(state, figures, "n")
    snap = state.cluster.snapshot()
    verdicts = fit(request(SMALL), snap, snap.rows(["n"]), NOW_S)
    assert verdicts.reason(0) is reason
    (node,) = explain(verdicts, Weights()).nearest
    assert f"    {line}" in explanation_lines(node)
    (plain,) = explain(fit(request("1Gi"), snap, snap.rows(["n"]), NOW_S), Weights()).nearest
    known, _, _ = line.partition("; ")
    message = [text.strip() for text in explanation_lines(plain) if "SM" in text]
    assert message == ([] if "unknown" in known else [known])


def test_bind_and_filter_use_the_same_sm_activity() -> None:
    state = node_with(shared("A", sm_activity=BUSY))
    brings(state, {("A", None): history(0.3)}, "n")
    assert not isinstance(state.cluster.judge(SMALL, state.cluster.gpunodes()[0], NOW_S), Reason)
    brings(state, {}, "n")
    assert state.cluster.judge(SMALL, state.cluster.gpunodes()[0], NOW_S) is Reason.SM_ABOVE_LIMIT


def test_the_age_belongs_to_the_newest_sample_even_if_its_value_is_equal() -> None:
    state = node_with(shared("A", sm_activity=BUSY), shared("B"))
    wall_s = EPOCH_S + NOW_S

    def ages(after_s: float) -> list[float | None]:
        (node,) = state.cluster.snapshot().nodes
        age_s = state.cluster.activities.age_s
        return [age_s(terms, NOW_S + after_s, wall_s + after_s) for terms in node.devices]

    assert ages(5) == [5.0, None]  # The report was sampled now.
    brings(state, {("A", None): history(0.1, NOW_S - 20)}, "n")
    assert ages(5) == [25.0, None]
    # The value is equal, so no node changes.
    brings(state, {("A", None): history(0.1, NOW_S + 10)})
    assert ages(15) == [5.0, None]
    brings(state, {})  # The history is gone, but this is not applied yet.
    assert ages(15) == [35.0, None]


def test_reservations_of_a_node_survive_concurrent_changes() -> None:
    held = {"q": reservation({"A": 8 << 30})}
    state = state_of(*seen(kube_node(), gpunode(shared("A"), reservations=held)))
    (before,) = state.cluster.snapshot().nodes[0].devices
    brings(state, {("A", None): history(0.1)}, "n")
    (after,) = state.cluster.snapshot().nodes[0].devices
    assert (after.committed_bytes, after.holders) == (before.committed_bytes, before.holders)
    assert after.committed_bytes == 8 << 30
