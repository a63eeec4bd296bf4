"""Changes of pods by the webhook, and which pods are changed."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.gate import gate_container, is_gated
from contract.gpunode import Replicas
from contract.kube import NodeSpec, Taint
from extender.placement.policy import Rules
from extender.placement.request import VramRequest, understand
from extender.placement.visible_devices import Visible
from tests.admission.reviews import (
    GATE_IMAGE,
    STATIC,
    all_containers,
    around,
    container,
    manifest,
    mutated,
    node,
    pod,
)
from tests.builders import GIB, device, mig, shared

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def env_of(obj: dict[str, Any], name: str = "main") -> dict[str, Any]:
    """Variable -> its value, or the annotation that it follows."""
    spec = obj["spec"]
    found = [c for c in [*(spec.get("initContainers") or ()), *spec["containers"]]]
    (one,) = (c for c in found if c["name"] == name)
    return {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        if "valueFrom" in each
        else each["value"]
        for each in one.get("env") or ()
    }


def follows(annotation: str) -> str:
    return f"metadata.annotations['headroom.gpu/{annotation}']"


class TestScheduler:
    @pytest.mark.parametrize(
        ("named", "label", "wanted", "becomes"),
        [
            pytest.param("default-scheduler", None, "headroom", "headroom", id="names none"),
            pytest.param("kai-scheduler", None, "headroom", "kai-scheduler", id="names another"),
            pytest.param("default-scheduler", "none", "headroom", "default-scheduler", id="out"),
            pytest.param("default-scheduler", "special", "headroom", "special", id="by label"),
            pytest.param(
                "default-scheduler", None, "default-scheduler", "default-scheduler", id="stock asks"
            ),
            pytest.param(
                "default-scheduler", "headroom", "default-scheduler", "headroom", id="opted in"
            ),
        ],
    )
    def test_of_gpu_pods(self, named: str, label: str | None, wanted: str, becomes: str) -> None:
        labels = {} if label is None else {"headroom.gpu/scheduler": label}
        stored, _ = mutated(manifest(schedulerName=named), around(labels=labels, scheduler=wanted))
        assert stored["spec"]["schedulerName"] == becomes

    def test_another_one_is_warned_of(self) -> None:
        _, answer = mutated(manifest(schedulerName="kai-scheduler"), around())
        assert answer.warnings == (
            "spec.schedulerName 'kai-scheduler': this scheduler does not call Headroom, so the pod "
            "may get a GPU without enough memory; set schedulerName: headroom",
        )

    def test_an_invalid_pod_goes_to_the_webhook_that_rejects_it(self) -> None:
        stored, _ = mutated(manifest("8Gj"), around())
        assert stored["spec"]["schedulerName"] == "headroom"

    @pytest.mark.parametrize(
        "obj",
        [
            pytest.param(manifest(None, container(gpus=0)), id="no GPU"),
            pytest.param(manifest("8Gi", container(gpus=0)), id="no GPU, annotated all the same"),
        ],
    )
    def test_others_are_left_alone(self, obj: dict[str, Any]) -> None:
        everything = around(
            node(choice="gated"),
            annotations={"headroom.gpu/default-vram": "4Gi", "headroom.gpu/share": "limit"},
            gate_image=GATE_IMAGE,
            mirror=True,
        )
        stored, answer = mutated(obj, everything)
        assert stored == obj
        assert answer.warnings == ()

    def test_a_static_pod_is_left_alone_if_a_kubelet_shows_it(self) -> None:
        where = around(node(choice="gated"), gate_image=GATE_IMAGE)
        obj = manifest(None, nodeName="n1", annotations={**STATIC, "headroom.gpu/retry": "x"})
        assert mutated(obj, replace(where, kubelet_node="n1"))[0] == obj
        for other in ("", "n2"):
            stored = mutated(obj, replace(where, kubelet_node=other))[0]
            assert "headroom.gpu/retry" not in stored["metadata"]["annotations"]

    def test_a_pod_with_a_node_has_no_use_for_a_scheduler_or_a_placement(self) -> None:
        everything = around(
            node(choice="pinned"),
            annotations={"headroom.gpu/share": "env", "headroom.gpu/gated": "true"},
            gate_image=GATE_IMAGE,
        )
        for scheduler in ("default-scheduler", "headroom"):
            obj = manifest(nodeName="n", schedulerName=scheduler)
            assert mutated(obj, everything)[0] == obj


class TestDefault:
    def test_is_recorded_with_its_source(self) -> None:
        stored, _ = mutated(
            manifest(None), around(annotations={"headroom.gpu/default-vram": "4Gi"})
        )
        assert stored["metadata"]["annotations"] == {
            "headroom.gpu/vram": "4Gi",
            "headroom.gpu/vram-from": "namespace team-a",
        }
        request = understand(pod(stored), None, Rules())
        assert isinstance(request, VramRequest)
        assert [(ask.amount_text, ask.source) for ask in request.containers] == [
            ("4Gi", "namespace")
        ]

    @pytest.mark.parametrize(
        ("own", "default", "becomes"),
        [
            pytest.param("8Gi", "4Gi", "8Gi", id="not over the pod's own"),
            pytest.param(None, "main=4Gi,other=2Gi", "main=4Gi", id="of containers it has"),
            pytest.param(None, "other=2Gi", None, id="none of its containers"),
            pytest.param(None, "4Gj", None, id="unreadable"),
            pytest.param(None, "25%", "25%", id="a share"),
        ],
    )
    def test_if_it_counts(self, own: str | None, default: str, becomes: str | None) -> None:
        where = around(annotations={"headroom.gpu/default-vram": default})
        stored, _ = mutated(manifest(own), where)
        held = stored["metadata"].get("annotations", {}).get("headroom.gpu/vram")
        assert held == becomes

    def test_what_only_extenders_write_is_removed(self) -> None:
        ours = {
            "headroom.gpu/placement": "{}",
            "headroom.gpu/devices.0": "GPU-a",
            "headroom.gpu/bytes.0": "1",
            "headroom.gpu/devices.~1": "x",  # no API server lets such a name in
            "headroom.gpu/retry": "x",
        }
        stored, answer = mutated(manifest("8Gi", annotations=ours), around())
        assert stored["metadata"]["annotations"] == {"headroom.gpu/vram": "8Gi"}
        assert [w.split()[1] for w in answer.warnings] == sorted(ours)


class TestPinned:
    PINNED = node("a", "pinned")
    FOLLOWS = {VISIBLE: "metadata.annotations['headroom.gpu/devices.0']"}  # noqa: RUF012 - read only

    def test_the_variable_follows_the_placement(self) -> None:
        obj = manifest("8Gi", container("side", 0), container("main"), container("more"))
        stored, _ = mutated(obj, around(self.PINNED))
        assert env_of(stored, "main") == {VISIBLE: follows("devices.1")}
        assert env_of(stored, "more") == {VISIBLE: follows("devices.2")}
        assert env_of(stored, "side") == {}
        request = understand(pod(stored), None, Rules())
        assert isinstance(request, VramRequest)
        assert request.visible is Visible.BY_PLACEMENT

    def test_init_containers_are_on_the_devices_of_the_other_containers(self) -> None:
        obj = manifest("8Gi", container("side", 0), container(), initContainers=[container("init")])
        stored, _ = mutated(obj, around(self.PINNED))
        assert env_of(stored, "init") == {VISIBLE: follows("devices.1")}
        request = understand(pod(stored), None, Rules())
        assert isinstance(request, VramRequest)
        assert request.visible is Visible.BY_PLACEMENT

    @pytest.mark.parametrize(
        "nodes",
        [
            pytest.param((), id="no node is known"),
            pytest.param((node("a"),), id="no pinned node"),
            pytest.param((PINNED, node("b")), id="it could go elsewhere"),
            pytest.param((PINNED, node("b", devices=None)), id="other nodes have no report"),
            pytest.param((node("a", "pinned", devices=None),), id="not reported yet"),
            pytest.param((node("a", "pinned", devices=[device()]),), id="devices of one pod each"),
            pytest.param((node("a", "steered"),), id="steered"),
            pytest.param((node("a", "no such choice"),), id="unreadable"),
        ],
    )
    def test_never_if_it_would_be_empty(self, nodes: tuple[Any, ...]) -> None:
        stored, _ = mutated(manifest(), around(*nodes))
        assert env_of(stored) == {}

    def test_confined_by_a_selector(self) -> None:
        nodes = node("a", "pinned", labels={"pool": "a"}), node("b", labels={"pool": "b"})
        for pool, env in (("a", {VISIBLE: follows("devices.0")}), ("b", {})):
            stored, _ = mutated(manifest(nodeSelector={"pool": pool}), around(*nodes))
            assert env_of(stored) == env

    def test_a_cordoned_node_may_be_used_again(self) -> None:
        taints = [Taint(key="node.kubernetes.io/not-ready", effect="NoExecute")]
        spec = NodeSpec(unschedulable=True, taints=taints)
        for other, env in (
            (spec, {}),
            (NodeSpec(taints=[Taint(key="team-b", effect="NoSchedule")]), self.FOLLOWS),
        ):
            held = msgspec.structs.replace(node("b").node, spec=other)
            where = around(self.PINNED, replace(node("b"), node=held))
            assert env_of(mutated(manifest(), where)[0]) == env

    @pytest.mark.parametrize(
        ("variable", "kept"),
        [
            pytest.param({"name": VISIBLE, "value": "all"}, "all", id="all"),
            pytest.param({"name": VISIBLE, "value": ""}, "", id="nothing"),
            pytest.param({"name": VISIBLE, "value": "GPU-x"}, "GPU-x", id="a device"),
        ],
    )
    def test_never_if_the_user_set_it(self, variable: dict[str, str], kept: str) -> None:
        obj = manifest("8Gi", container(env=[variable]), container("more"))
        stored, _ = mutated(obj, around(self.PINNED))
        assert env_of(stored) == {VISIBLE: kept}
        assert env_of(stored, "more") == {}

    def test_nor_if_an_unreadable_config_map_may_have_one(self) -> None:
        obj = manifest("8Gi", container(envFrom=[{"configMapRef": {"name": "c"}}]))
        assert env_of(mutated(obj, around(self.PINNED))[0]) == {VISIBLE: follows("devices.0")}
        suspicious = Rules(suspect_env_from=True)
        where = replace(around(self.PINNED), rules=suspicious)
        assert env_of(mutated(obj, where)[0]) == {}

    def test_not_of_another_scheduler_s(self) -> None:
        obj = manifest(schedulerName="kai-scheduler")
        assert mutated(obj, around(self.PINNED))[0] == obj
        opted_out = around(self.PINNED, labels={"headroom.gpu/scheduler": "none"})
        assert mutated(manifest(), opted_out)[0] == manifest()


class TestGate:
    def test_if_a_gated_node_may_take_it(self) -> None:
        obj = manifest(initContainers=[container("init", 0)])
        where = around(node("a", "gated"), node("b"), gate_image=GATE_IMAGE)
        stored, answer = mutated(obj, where)
        gate, init = stored["spec"]["initContainers"]
        assert gate == gate_container(GATE_IMAGE)
        assert init["name"] == "init"
        assert is_gated(pod(stored), GATE_IMAGE)
        assert answer.warnings == ()

    @pytest.mark.parametrize(
        ("of_pod", "of_namespace", "nodes", "gated"),
        [
            pytest.param("true", None, (), True, id="the pod's wish"),
            pytest.param(None, "true", (), True, id="its namespace's wish"),
            pytest.param("false", "true", (node(choice="gated"),), False, id="the pod counts more"),
            pytest.param(None, None, (node(),), False, id="nobody's"),
            pytest.param("yes", None, (), False, id="unreadable"),
        ],
    )
    def test_if_enabled(
        self, of_pod: str | None, of_namespace: str | None, nodes: tuple[Any, ...], gated: bool
    ) -> None:
        key = "headroom.gpu/gated"
        obj = manifest(annotations={} if of_pod is None else {key: of_pod})
        annotations = {} if of_namespace is None else {key: of_namespace}
        stored, _ = mutated(obj, around(*nodes, annotations=annotations, gate_image=GATE_IMAGE))
        assert is_gated(pod(stored), GATE_IMAGE) is gated

    def test_not_if_no_agent_would_open_it(self) -> None:
        where = around(node("a", "gated"), node("b", devices=None), gate_image=GATE_IMAGE)
        stored, answer = mutated(manifest(), where)
        assert not is_gated(pod(stored), GATE_IMAGE)
        assert answer.warnings == (
            "the pod gets no gate, so gated nodes like a reject it: it is also eligible for b, "
            "which has no agent to open a gate; set a nodeSelector, or headroom.gpu/gated: 'true'",
        )

    def test_without_an_image_it_reports_that(self) -> None:
        stored, answer = mutated(manifest(), around(node("a", "gated")))
        assert not is_gated(pod(stored), GATE_IMAGE)
        assert "set gate_image in Headroom's settings" in answer.warnings[0]

    def test_comes_first_again_when_others_put_theirs_before_it(self) -> None:
        where = around(node("a", "gated"), gate_image=GATE_IMAGE)
        stored, _ = mutated(manifest(), where)
        stored["spec"]["initContainers"].insert(0, container("mesh", 0))
        again, _ = mutated(stored, where)
        assert [c["name"] for c in again["spec"]["initContainers"]] == ["headroom-gate", "mesh"]
        assert is_gated(pod(again), GATE_IMAGE)

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"image": "busybox", "command": ["true"]}, id="another image"),
            pytest.param({"command": ["true"]}, id="another command"),
            pytest.param({"restartPolicy": "Always"}, id="a sidecar"),
            pytest.param({"env": [{"name": "HEADROOM_AGENT_PORT", "value": "1"}]}, id="a port"),
            pytest.param({"volumeMounts": [{"name": "v", "mountPath": "/app"}]}, id="other files"),
        ],
    )
    def test_what_only_has_its_name_is_replaced_by_the_whole_gate(
        self, other: dict[str, Any]
    ) -> None:
        where = around(node("a", "gated"), gate_image=GATE_IMAGE)
        forged = {**gate_container(GATE_IMAGE), **other}
        stored, _ = mutated(manifest(initContainers=[container("mesh", 0), forged]), where)
        gate, mesh = stored["spec"]["initContainers"]
        assert gate == gate_container(GATE_IMAGE)
        assert mesh["name"] == "mesh"


class TestShare:
    def test_variables_follow_the_placement(self) -> None:
        obj = manifest(
            "main=8Gi,more=1Gi",
            container("side", 0),
            container(env=[{"name": "HEADROOM_VRAM_BYTES", "value": "mine"}]),
            container("more"),
            annotations={"headroom.gpu/share": "env"},
        )
        stored, _ = mutated(obj, around())
        assert env_of(stored, "main") == {
            "HEADROOM_VRAM_BYTES": "mine",
            "HEADROOM_VRAM_FRACTION": follows("fraction.1"),
        }
        assert env_of(stored, "more") == {
            "HEADROOM_VRAM_BYTES": follows("bytes.2"),
            "HEADROOM_VRAM_FRACTION": follows("fraction.2"),
        }
        assert env_of(stored, "side") == {}

    def test_a_namespace_may_enable_it_and_a_pod_may_disable_it(self) -> None:
        where = around(annotations={"headroom.gpu/share": "env"})
        assert len(env_of(mutated(manifest(), where)[0])) == 2
        declined = manifest(annotations={"headroom.gpu/share": "none"})
        assert env_of(mutated(declined, where)[0]) == {}

    CAPABLE = node("a", driver="615.10", strategy="cdi-annotations,cdi-cri", limits="ok")

    @pytest.mark.parametrize(
        ("vram", "nodes", "mib"),
        [
            pytest.param("8Gi", (CAPABLE,), "8192", id="the driver can"),
            pytest.param("8G", (CAPABLE,), "7629", id="rounded down"),
            pytest.param("25%", (CAPABLE,), None, id="a share is not known yet"),
            pytest.param("1Ki", (CAPABLE,), None, id="less than a MiB"),
            pytest.param("8Gi", (CAPABLE, node("b")), None, id="another node cannot"),
            pytest.param(
                "8Gi",
                (node("a", driver="614.99", strategy="cdi-cri", limits="ok"),),
                None,
                id="older driver",
            ),
            pytest.param(
                "8Gi", (node("a", driver="615.10", limits="ok"),), None, id="no CDI, no hook"
            ),
            pytest.param(
                "8Gi", (node("a", driver="615.10", strategy="cdi-cri"),), None, id="no cgroups v2"
            ),
            pytest.param(
                "8Gi",
                (
                    node(
                        "a",
                        driver="615.10",
                        strategy="cdi-cri",
                        limits="ok",
                        devices=[mig("MIG-a", 1)],
                    ),
                ),
                None,
                id="MIG",
            ),
            pytest.param("8Gi", (), None, id="no node"),
        ],
    )
    def test_the_driver_s_cap(self, vram: str, nodes: tuple[Any, ...], mib: str | None) -> None:
        obj = manifest(vram, annotations={"headroom.gpu/share": "limit"})
        stored, answer = mutated(obj, around(*nodes))
        env = env_of(stored)
        assert env.get("NVIDIA_GPU_MEMORY_LIMIT") == env.get("NVIDIA_GPU_MEMORY_REQUEST") == mib
        assert any("nothing can limit the pod" in warning for warning in answer.warnings) is (
            mib is None
        )

    @pytest.mark.parametrize("own", ["NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"])
    def test_a_cap_of_the_user_s_stands_alone(self, own: str) -> None:
        obj = manifest("8Gi", container(env=[{"name": own, "value": "100"}]))
        obj["metadata"]["annotations"]["headroom.gpu/share"] = "limit"
        env = env_of(mutated(obj, around(self.CAPABLE))[0])
        assert {name for name in env if name.startswith("NVIDIA_GPU")} == {own}

    @pytest.mark.parametrize(
        ("vram", "processes", "gpus", "mps"),
        [
            pytest.param("4Gi", "1", 1, "0=4096M", id="lower"),
            pytest.param("6Gi", "1", 1, None, id="the plugin's own"),
            pytest.param("8Gi", "1", 1, None, id="higher"),
            pytest.param("8Gi", "4", 1, "0=2048M", id="each process"),
            pytest.param("4Gi", "1", 2, None, id="two devices are not distinguished"),
        ],
    )
    def test_mps_if_it_lowers_the_plugin_s_own(
        self, vram: str, processes: str, gpus: int, mps: str | None
    ) -> None:
        each = shared("GPU-a", sharing="mps", memory_bytes=24 * GIB, replicas=Replicas(free=4))
        wishes = {"headroom.gpu/share": "limit", "headroom.gpu/processes": processes}
        obj = manifest(vram, container(gpus=gpus), annotations=wishes)
        stored, _ = mutated(obj, around(node(devices=[each])))
        assert env_of(stored).get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") == mps


class TestMirror:
    def test_of_all_devices_in_mib(self) -> None:
        obj = manifest("8G", container(gpus=2), initContainers=[container("init")])
        stored, _ = mutated(obj, around(mirror=True))
        (main,) = stored["spec"]["containers"]
        mib = {"nvidia.com/gpu": "2", "headroom.gpu/vram": "15260"}  # each is 7629.4
        assert main["resources"] == {"limits": mib, "requests": mib}
        (init,) = stored["spec"]["initContainers"]
        assert init["resources"]["limits"]["headroom.gpu/vram"] == "7630"
        before = understand(pod(obj), None, Rules())
        after = understand(pod(stored), None, Rules())
        assert isinstance(before, VramRequest)
        assert isinstance(after, VramRequest)
        assert before.asks == after.asks

    def test_what_is_not_known_is_not_counted(self) -> None:
        stored, answer = mutated(manifest("25%"), around(mirror=True))
        assert "headroom.gpu/vram" not in stored["spec"]["containers"][0]["resources"]["limits"]
        assert "container 'main' does not count as headroom.gpu/vram" in answer.warnings[0]

    @pytest.mark.parametrize(("vram", "expected"), [("8Gi", "8192"), ("25%", "1")])
    def test_a_value_of_the_author_is_replaced_if_the_amount_is_known(
        self, vram: str, expected: str
    ) -> None:
        own = container()
        for each in own["resources"].values():
            each["headroom.gpu/vram"] = "1"
        stored, answer = mutated(manifest(vram, own), around(mirror=True))
        (main,) = stored["spec"]["containers"]
        assert main["resources"]["requests"]["headroom.gpu/vram"] == expected
        assert main["resources"]["limits"]["headroom.gpu/vram"] == expected
        assert answer.warnings == ()


# Whatever the pod.

ENV = st.lists(
    st.sampled_from(
        [
            {"name": VISIBLE, "value": "all"},
            {"name": "HEADROOM_VRAM_BYTES", "value": "7"},
            {"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "7"},
            {"name": "OTHER", "value": "x"},
        ]
    ),
    max_size=2,
    unique_by=lambda each: each["name"],
)


@st.composite
def containers(draw: st.DrawFn, name: str) -> dict[str, Any]:
    made = container(name, draw(st.integers(0, 2)))
    env = draw(st.none() | ENV)
    if env is not None or draw(st.booleans()):
        made["env"] = env
    if draw(st.booleans()):
        made["resources"].pop("requests")
    return made


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    made = manifest(
        draw(st.sampled_from([None, "8Gi", "25%", "8Gj", "c0=8Gi"])),
        *[draw(containers(f"c{i}")) for i in range(draw(st.integers(1, 3)))],
        annotations=draw(
            st.dictionaries(
                st.sampled_from(
                    [
                        "headroom.gpu/gated",
                        "headroom.gpu/share",
                        "headroom.gpu/placement",
                        "headroom.gpu/devices.0",
                        "foreign/key~x",
                    ]
                ),
                st.sampled_from(["true", "false", "env", "limit", "{}"]),
            )
        ),
        schedulerName=draw(st.sampled_from(["default-scheduler", "headroom", "other"])),
    )
    init = [draw(containers(f"i{i}")) for i in range(draw(st.integers(0, 2)))]
    if init or draw(st.booleans()):
        made["spec"]["initContainers"] = init or draw(st.sampled_from([None, []]))
    return made


ARROUNDS = st.builds(
    lambda choices, default, mirror, share: around(
        *(
            node(f"n{i}", choice, driver="615.1", strategy="cdi-cri", limits="ok")
            for i, choice in enumerate(choices)
        ),
        annotations={
            **({"headroom.gpu/default-vram": default} if default else {}),
            **({"headroom.gpu/share": share} if share else {}),
        },
        gate_image=GATE_IMAGE,
        mirror=mirror,
        counts=mirror,
    ),
    st.lists(st.sampled_from([None, "gated", "pinned", "any"]), max_size=3),
    st.sampled_from(["", "4Gi", "c1=4Gi"]),
    st.booleans(),
    st.sampled_from(["", "env", "limit"]),
)


@given(pods(), ARROUNDS)
def test_done_again_it_changes_nothing(obj: dict[str, Any], where: Any) -> None:
    stored, _ = mutated(obj, where)
    again, answer = mutated(stored, where)
    # The gate is put there whole each time: others may have changed what is not compared.
    of_gate = "/spec/initContainers/0"
    assert {operation.path for operation in answer.operations} <= {of_gate}
    assert again == stored


@given(pods(), ARROUNDS)
def test_what_is_not_ours_stays_as_it_was(obj: dict[str, Any], where: Any) -> None:
    stored, _ = mutated(obj, where)
    assert without_ours(stored) == without_ours(obj)
    names = [c["name"] for c in stored["spec"].get("initContainers") or ()]
    assert names.count("headroom-gate") <= 1
    for each in all_containers(stored):
        variables = [v["name"] for v in each.get("env") or ()]
        assert len(variables) == len(set(variables))


#: All that is ever written into a container.
WRITTEN = {
    VISIBLE,
    "HEADROOM_VRAM_BYTES",
    "HEADROOM_VRAM_FRACTION",
    "NVIDIA_GPU_MEMORY_LIMIT",
    "NVIDIA_GPU_MEMORY_REQUEST",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
}


def without_ours(obj: dict[str, Any]) -> Any:
    """The pod less what Headroom may write: values of variables that a user set are no part of
    that."""
    spec = obj["spec"]
    metadata = dict(obj["metadata"])
    annotations = metadata.pop("annotations", None) or {}
    scheduler = spec["schedulerName"]
    return (
        metadata,
        {key: text for key, text in annotations.items() if not key.startswith("headroom.gpu/")},
        "-" if scheduler in ("default-scheduler", "headroom") else scheduler,
        [_bare(c) for c in all_containers(obj) if c["name"] != "headroom-gate"],
    )


def _bare(each: dict[str, Any]) -> Any:
    env = [
        v
        for v in each.get("env") or ()
        if v["name"] not in WRITTEN or (v.get("value") in ("all", "7") and "valueFrom" not in v)
    ]
    amounts = {
        key: {
            n: q
            for n, q in held.items()
            if n not in ("headroom.gpu/vram", "headroom.gpu/vram-bytes")
        }
        for key, held in each["resources"].items()
    }
    amounts = {key: held for key, held in amounts.items() if held}
    rest = {k: v for k, v in each.items() if k not in ("env", "resources")}
    return rest, env, amounts


def test_in_mode_observe_no_pod_depends_on_a_placement() -> None:
    """A pod without room is bound then, and has none."""
    pinned = node(choice="pinned")
    asked = {"headroom.gpu/share": "env"}
    places = around(pinned, gate_image=GATE_IMAGE, observes=True)
    for obj in (manifest(annotations=asked), manifest(annotations={"headroom.gpu/gated": "true"})):
        before = obj["spec"] | {"schedulerName": "headroom"}
        stored, _ = mutated(obj, places)
        assert stored["spec"] == before
        enforced, _ = mutated(obj, around(pinned, gate_image=GATE_IMAGE))
        assert enforced["spec"] != before
