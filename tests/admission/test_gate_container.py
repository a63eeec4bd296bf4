"""The init container that waits for the node's agent."""

from typing import Any

import pytest

from contract.gate import gate_container, is_gated
from tests.admission.reviews import (
    GATE_IMAGE,
    around,
    container,
    manifest,
    mutated,
    node,
    pod,
)


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
            pytest.param(None, None, (node(),), False, id="not requested"),
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
