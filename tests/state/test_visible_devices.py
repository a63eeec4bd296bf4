"""Tests pods that set NVIDIA_VISIBLE_DEVICES themselves, or may do so by envFrom."""

from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import Plugin
from headroom.contract.kube import EnvFromSource, EnvVar, EnvVarSource, FieldRef, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.fit import fit
from headroom.core.placement.fit_cache import FitCache
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules, VisibleDevices, Weights
from headroom.core.placement.snapshot import CODE_OF
from tests.builders import NOW_S, container, device, gpunode, kube_node, pod
from tests.state.states import state_of

NAME = "NVIDIA_VISIBLE_DEVICES"


def setting(*variables: EnvVar, where: str = "gpu", uid: str = "uid-p") -> Pod:
    """Return a pod whose GPU container, other container or init container has these variables."""
    named = {
        "gpu": container(),
        "neighbour": container("other", gpus=0),
        "init": container("first", gpus=0),
    }
    named[where] = msgspec.structs.replace(named[where], env=list(variables))
    return pod("8Gi", named["gpu"], named["neighbour"], init=[named["init"]], uid=uid, name=uid)


def node(rules: Rules | None = None, *, ignores: bool = False) -> ClusterWriter:
    reported = gpunode(device(), plugin=Plugin(ignores_visible_devices=ignores))
    return state_of(NodeSeen(kube_node()), GPUNodeSeen(reported, NOW_S), rules=rules)


def verdict(state: ClusterWriter, of: Pod) -> Reason | None:
    request: Any = state.cluster.understand(of)
    snap = state.cluster.snapshot()
    reason = fit(request, snap, snap.rows(["n"]), NOW_S).reason(0)
    held = state.cluster.gpunode("n")
    assert held is not None
    judged = state.cluster.judge(of, held, NOW_S)
    assert (judged if isinstance(judged, Reason) else None) is reason
    return reason


@pytest.mark.parametrize(
    ("ignores", "reason"),
    [
        pytest.param(False, Reason.CHOOSES_DEVICES, id="the variable may have an effect"),
        pytest.param(True, None, id="the variable is ignored"),
    ],
)
@pytest.mark.parametrize("where", ["gpu", "neighbour", "init"])
def test_the_variable_counts_if_it_may_have_an_effect_on_the_node(
    ignores: bool, reason: Reason | None, where: str
) -> None:
    asked = setting(EnvVar(name=NAME, value="all"), where=where)
    assert verdict(node(ignores=ignores), asked) is reason


@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        pytest.param(EnvVar(name=NAME, value="GPU-0"), True, id="a device"),
        pytest.param(EnvVar(name=NAME, value_from=EnvVarSource()), True, id="unreadable reference"),
        pytest.param(EnvVar(name=NAME, value="none"), False, id="none"),
        pytest.param(EnvVar(name=NAME, value="void"), False, id="void"),
        pytest.param(EnvVar(name=NAME), False, id="empty"),
        pytest.param(EnvVar(name=NAME, value="$(OTHER)"), True, id="another variable of the pod"),
        pytest.param(
            EnvVar(name="NVIDIA_DRIVER_CAPABILITIES", value="all"), False, id="another variable"
        ),
    ],
)
def test_values_of_the_variable_that_name_devices_are_recognised(
    variable: EnvVar, counts: bool
) -> None:
    assert (verdict(node(), setting(variable)) is not None) == counts


def test_the_variable_is_read_from_a_manifest() -> None:
    manifest = {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                    "env": [
                        {"name": "A", "value": "b"},
                        {"name": NAME, "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                    ],
                }
            ]
        },
    }
    read = msgspec.json.decode(msgspec.json.encode(manifest), type=Pod)
    assert verdict(node(), read) is Reason.CHOOSES_DEVICES


def test_a_cached_result_is_not_used_for_a_pod_with_a_reservation() -> None:
    state, cached_fits = node(), FitCache(Weights())
    plain: Any = state.cluster.understand(setting())
    chooses: Any = state.cluster.understand(setting(EnvVar(name=NAME, value="all")))
    snap = state.cluster.snapshot()
    rows = snap.rows(["n"])
    message = [cached_fits.weigh(r, snap).codes(snap, rows, NOW_S)[0] for r in (plain, chooses)]
    assert message == [0, CODE_OF[Reason.CHOOSES_DEVICES]]


def test_the_last_of_two_equally_named_variables_counts() -> None:
    all_, none = EnvVar(name=NAME, value="all"), EnvVar(name=NAME, value="none")
    assert verdict(node(), setting(all_, none)) is None
    assert verdict(node(), setting(none, all_)) is Reason.CHOOSES_DEVICES


CHARGE = Rules(visible_devices=VisibleDevices.CHARGE)


def test_the_setting_charges_the_pod_instead_of_rejecting_it() -> None:
    asked = setting(EnvVar(name=NAME, value="all"))
    assert verdict(node(CHARGE), asked) is None
    placement = placed(node(CHARGE), asked)
    assert [charge.by_environment for charge in placement.charges] == [True]


def following(path: str) -> EnvVar:
    return EnvVar(name=NAME, value_from=EnvVarSource(field_ref=FieldRef(field_path=path)))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("metadata.annotations['headroom.gpu/devices.0']", id="its placement"),
        pytest.param("metadata.name", id="something else"),
    ],
)
def test_a_variable_from_a_field_of_the_pod_is_the_pods_own_choice(path: str) -> None:
    assert verdict(node(), setting(following(path))) is Reason.CHOOSES_DEVICES


def reading(*sources: EnvFromSource, env: tuple[EnvVar, ...] = ()) -> Pod:
    return pod("8Gi", msgspec.structs.replace(container(), env_from=list(sources), env=list(env)))


SUSPECT = Rules(suspect_env_from=True)


@pytest.mark.parametrize(
    ("asked", "suspected"),
    [
        pytest.param(reading(EnvFromSource()), True, id="a ConfigMap or Secret"),
        pytest.param(reading(EnvFromSource(prefix="NVIDIA_")), True, id="a prefix of the name"),
        pytest.param(reading(EnvFromSource(prefix="APP_")), False, id="a prefix that excludes it"),
        pytest.param(
            reading(EnvFromSource(), env=(EnvVar(name=NAME, value="none"),)),
            False,
            id="the pod's own value has priority",
        ),
        pytest.param(
            reading(EnvFromSource(), env=(EnvVar(name="OTHER", value="x"),)),
            True,
            id="the pod sets another variable",
        ),
    ],
)
def test_env_from_is_suspected_only_with_the_setting(asked: Pod, suspected: bool) -> None:
    assert verdict(node(), asked) is None
    reason = Reason.CHOOSES_DEVICES if suspected else None
    assert verdict(node(SUSPECT), asked) is reason
    assert verdict(node(SUSPECT, ignores=True), asked) is None


def placed(state: ClusterWriter, of: Pod) -> Placement:
    held = state.cluster.gpunode("n")
    assert held is not None
    placement = state.cluster.judge(of, held, NOW_S)
    assert isinstance(placement, Placement)
    return placement
