"""Checks that a later change of a bound pod's request does not change its reservation, and is
reported.
"""

import msgspec
import pytest

from headroom.contract.annotations import PLACEMENT, VRAM
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeGone, PodGone, PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.notices import notices, pod_subject
from headroom.core.cluster.trackers.request_drift import edit
from headroom.core.placement.placement_record import Placement
from tests.builders import GIB, NOW_S, gpunode, kube_node, pod, shared
from tests.state.states import seen, state_of


def bound(asked: str | None, now: str | None) -> tuple[ClusterWriter, Pod]:
    """Return a pod that Headroom bound, whose author has since changed its annotation to
    ``now``."""
    node = gpunode(shared("a"))
    state = state_of(*seen(kube_node(), node))
    placement = state.cluster.judge(pod(asked), node, NOW_S)
    assert isinstance(placement, Placement)
    return state, pod(now, annotations=placement.annotations, node="n")


@pytest.mark.parametrize(
    ("asked", "now", "says"),
    [
        pytest.param("8Gi", "8Gi", "", id="untouched"),
        pytest.param(None, None, "", id="never had a request"),
        pytest.param("8Gi", "1Gi", "from '8Gi' to '1Gi'", id="lowered"),
        pytest.param("25%", "20Gi", "from '25%' to '20Gi'", id="raised"),
        pytest.param("8Gi", None, "from '8Gi' to nothing", id="removed"),
        pytest.param(None, "8Gi", "from nothing to '8Gi'", id="added"),
        pytest.param("8Gi", "lots", "from '8Gi' to 'lots'", id="invalid"),
        pytest.param("8Gi", "8" * 9999, "8888'...", id="very long"),
    ],
)
def test_an_edited_request_is_reported(asked: str | None, now: str | None, says: str) -> None:
    state, edited = bound(asked, now)
    state.apply([PodSeen(edited)])
    found = list(notices(state.cluster))
    assert bool(found) == bool(says) == bool(edit(edited))
    for notice in found:
        assert (notice.about, notice.reason) == (pod_subject(edited), "RequestChangeIgnored")
        assert says in notice.message
        assert len(notice.message) < 400


def test_an_edit_is_no_longer_reported_after_it_is_reverted_or_the_pod_ends() -> None:
    state, edited = bound("8Gi", "1Gi")
    state.apply([PodSeen(edited)])
    assert list(notices(state.cluster))
    annotations = {**(edited.metadata.annotations or {}), VRAM: "8Gi"}
    metadata = msgspec.structs.replace(edited.metadata, annotations=annotations)
    state.apply([PodSeen(msgspec.structs.replace(edited, metadata=metadata))])
    assert list(notices(state.cluster)) == []
    state.apply([PodSeen(edited), PodGone("uid-p")])
    assert list(notices(state.cluster)) == []


def test_a_second_edit_is_a_separate_event() -> None:
    state, edited = bound("8Gi", "1Gi")
    state.apply([PodSeen(edited)])
    (first,) = notices(state.cluster)
    _, again = bound("8Gi", "2Gi")
    state.apply([PodSeen(again)])
    (second,) = notices(state.cluster)
    assert first.key != second.key


def test_reservations_are_restored_when_the_ledger_is_lost() -> None:
    """When the node is initialised again, it charges the request that the pod had at its bind."""
    state, edited = bound("8Gi", "1Gi")
    state.apply([GPUNodeGone("n")])
    adopted = state.cluster.adopt(edited, gpunode(shared("a")))
    assert adopted is not None
    assert adopted.charges[0].candidates == {"a": 8 * GIB}


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("nonsense", id="no JSON"),
        pytest.param('{"more":' + "[" * 100_000, id="deep"),
        pytest.param('{"node":"n","asked":7}', id="wrong type"),
        pytest.param('{"node":"n"}', id="of an older version"),
        pytest.param('{"node":"elsewhere","asked":"1Gi"}', id="of another node"),
    ],
)
def test_a_placement_without_a_request_counts_as_unedited(placement: str) -> None:
    assert edit(pod("8Gi", annotations={PLACEMENT: placement}, node="n")) == ""


def adopted_as(asked: str | None, now: str | None) -> tuple[ClusterWriter, Pod]:
    """Bind an adopted pod, and change its annotation later."""
    node = gpunode(shared("a"))
    state = state_of(*seen(kube_node(), node))
    reservation = state.cluster.adopt(pod(asked, node="n"), node)
    assert reservation is not None
    charged = gpunode(shared("a"), reservations={"uid-p": reservation})
    edited = pod(now, node="n")
    state.apply([PodSeen(edited), *seen(charged)])
    return state, edited


@pytest.mark.parametrize(
    ("asked", "now", "says"),
    [
        pytest.param("8Gi", "8Gi", "", id="untouched"),
        pytest.param(None, None, "", id="never had a request"),
        pytest.param("8Gi", "1Gi", "from '8Gi' to '1Gi'", id="lowered"),
        pytest.param(None, "8Gi", "from nothing to '8Gi'", id="added"),
        pytest.param("8Gi", None, "from '8Gi' to nothing", id="removed"),
    ],
)
def test_an_edit_of_an_adopted_pod_is_reported_too(
    asked: str | None, now: str | None, says: str
) -> None:
    state, edited = adopted_as(asked, now)
    shown = [notice for notice in notices(state.cluster) if notice.reason == "RequestChangeIgnored"]
    assert bool(shown) == bool(says)
    about = pod_subject(edited)
    assert all(notice.about == about and says in notice.message for notice in shown)
    assert says in state.cluster.edits.of("uid-p")
    state.apply([PodGone("uid-p")])
    assert state.cluster.edits.of("uid-p") == ""
