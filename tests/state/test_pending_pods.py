"""Tests the message for the author of a rejected pod, which has the numbers of the nearest device
and the counted reasons.
"""

from collections.abc import Mapping

import msgspec
import pytest

from headroom.contract.kube import ObjectMeta, Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Decision
from headroom.core.whatif.pending_pods import (
    Explaining,
    Pending,
    main_reason,
    rejections_in_condition,
)
from tests.builders import GIB, NOW_S, gpunode, kube_node, pod, reservation, shared
from tests.state.states import seen, state_of
from tests.state.test_requeue_hints import SAID, rejected

NOT_ASKED = "not_asked"

TWO = {Reason.MEMORY_ON_ANY: 2, Reason.STALE_REPORT: 1}


def decision(of: Pod, rejected: Mapping[Reason, int] = TWO) -> Decision:
    return Decision(of, "id", 0.0, 1, sum(rejected.values()), 0, rejected)


def world(*labelled: tuple[str, int, dict[str, str]]) -> ClusterWriter:
    """Return nodes with one 24 GiB GPU each, which has index 3 and this many GiB reserved."""
    what: list[object] = []
    for name, gib, labels in labelled:
        metadata = ObjectMeta(name=name, uid=name, labels=labels)
        what.append(msgspec.structs.replace(kube_node(name), metadata=metadata))
        reservations = {f"u-{name}": reservation({f"GPU-{name}": gib * GIB})}
        what.append(gpunode(shared(f"GPU-{name}", index=3), name=name, reservations=reservations))
    return state_of(*seen(*what))  # type: ignore[arg-type]


def message(
    state: ClusterWriter, of: Pod, rejected: Mapping[Reason, int] = TWO, again: bool = False
) -> str | None:
    explaining = Explaining(state.cluster, state.cluster.snapshot(), NOW_S)
    notice = explaining.notice(of, decision(of, rejected), again)
    assert notice is None or notice.decision_id == "id"
    return None if notice is None else notice.message


def test_the_numbers_of_the_nearest_device_are_shown() -> None:
    state = world(("far", 20, {}), ("near", 8, {}))
    assert message(state, pod("20Gi", name="p")) == (
        "Nearest of 3 nodes: short by 4.0 GiB of 20.0 GiB on GPU 3 (GPU-near) of near. "
        "More: kubectl headroom why -n default p"
    )


def test_a_missing_annotation_is_mentioned() -> None:
    """The author may have created a Deployment, and never see the webhook's warning."""
    sentence = "Annotation headroom.gpu/vram is missing, so the pod requests the share of one"
    full = world(("n", 24, {}))
    shown = message(full, pod(None, name="p"))
    assert shown is not None
    assert f" {sentence} replica. More: kubectl" in shown
    assert sentence not in str(message(full, pod("8Gi", name="p")))


def test_the_nearest_device_is_on_an_eligible_node() -> None:
    state = world(("far", 20, {"pool": "mine"}), ("near", 8, {}))
    picky = pod("20Gi")
    spec = msgspec.structs.replace(picky.spec, node_selector={"pool": "mine"})
    shown = message(state, msgspec.structs.replace(picky, spec=spec))
    assert shown is not None
    assert "short by 16.0 GiB of 20.0 GiB on GPU 3 (GPU-far) of far" in shown


def test_a_pod_that_fits_by_now_gets_no_event_unless_a_retry_does_not_help() -> None:
    state = world(("n", 2, {}))
    assert message(state, pod("20Gi")) is None
    shown = message(state, pod("20Gi"), again=True)
    assert shown is not None
    assert "The pod would fit on n, which kube-scheduler does not offer." in shown


def test_equal_pods_each_get_their_own_eligible_nodes() -> None:
    state = world(("far", 20, {"pool": "mine"}), ("near", 8, {}))
    explaining = Explaining(state.cluster, state.cluster.snapshot(), NOW_S)
    spec = msgspec.structs.replace(pod("20Gi").spec, node_selector={"pool": "mine"})
    for picky, node in ((False, "near"), (True, "far"), (False, "near")):
        asks = pod("20Gi")
        asks = msgspec.structs.replace(asks, spec=spec) if picky else asks
        notice = explaining.notice(asks, decision(asks))
        assert notice is not None
        assert f"of {node}. More" in notice.message
    larger = explaining.notice(pod("22Gi"), decision(pod("22Gi")))
    assert larger is not None
    assert "short by 6.0 GiB of 22.0 GiB" in larger.message


def test_an_invalid_or_too_large_pod_gets_only_the_reasons() -> None:
    state = world(("n", 2, {}))
    shown = message(state, pod("much"), {Reason.BAD_VRAM: 1})
    assert shown == (
        "0 of 1 node can take the pod: 1 annotation headroom.gpu/vram is not valid (example: 8Gi). "
        "More: kubectl headroom why -n default p"
    )
    unreported = message(
        ClusterWriter(state.cluster.rules, 90.0, 0.0), pod("8Gi"), {Reason.UNKNOWN_NODE: 2}
    )
    assert unreported is not None
    assert "Nearest" not in unreported


def test_the_most_frequent_of_many_reasons_are_shown() -> None:
    many = {reason: 2 + i for i, reason in enumerate(list(Reason)[:6])}
    shown = message(world(), pod("8Gi"), many)
    assert shown is not None
    assert "; 9 for other reasons." in shown
    assert shown.index(list(Reason)[5].sentence) < shown.index(list(Reason)[3].sentence)


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.code)
def test_every_reason_is_parsed_from_the_condition(reason: Reason) -> None:
    reported = (
        f"0/9 nodes are available: 2 node(s) had untolerated taint(s), 7 {reason.sentence}. no"
    )
    assert rejections_in_condition(rejected("u", message=reported)) == {reason: 7}


def test_the_main_reason_is_the_reason_of_most_nodes() -> None:
    assert rejections_in_condition(rejected("u", message=SAID)) == {Reason.MEMORY_ON_ANY: 2}
    assert main_reason(TWO) == "memory_on_any"
    assert main_reason({}) == NOT_ASKED == main_reason(rejections_in_condition(pod()))
    even = {Reason.STALE_REPORT: 1, Reason.MEMORY_ON_ANY: 1}
    assert main_reason(even) == main_reason(dict(reversed(even.items())))


def test_the_oldest_pod_of_each_reason_is_kept() -> None:
    pending = Pending()
    for code, created in (
        ("a", "2026-11-21T02:00:00Z"),
        ("a", "2026-11-21T01:00:00Z"),
        ("a", ""),
        ("b", ""),
    ):
        pending.add(code, created)
    assert pending.pods == {"a": 3, "b": 1}
    assert pending.oldest == {"a": "2026-11-21T01:00:00Z"}
