"""Tests the init container that waits for the node's agent."""

from typing import Any

import pytest

from headroom.contract.gate import gate_container, is_gated
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
    def test_the_gate_is_added_if_a_gated_node_may_take_the_pod(self) -> None:
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
            pytest.param("true", None, (), True, id="annotation of the pod"),
            pytest.param(None, "true", (), True, id="annotation of the namespace"),
            pytest.param(
                "false", "true", (node(choice="gated"),), False, id="the pod has priority"
            ),
            pytest.param(None, None, (node(),), False, id="not requested"),
            pytest.param("yes", None, (), False, id="unreadable"),
        ],
    )
    def test_the_gate_is_added_if_it_is_enabled(
        self, of_pod: str | None, of_namespace: str | None, nodes: tuple[Any, ...], gated: bool
    ) -> None:
        key = "headroom.gpu/gated"
        obj = manifest(annotations={} if of_pod is None else {key: of_pod})
        annotations = {} if of_namespace is None else {key: of_namespace}
        stored, _ = mutated(obj, around(*nodes, annotations=annotations, gate_image=GATE_IMAGE))
        assert is_gated(pod(stored), GATE_IMAGE) is gated

    def test_the_gate_is_not_added_if_no_agent_would_open_it(self) -> None:
        where = around(node("a", "gated"), node("b", devices=None), gate_image=GATE_IMAGE)
        stored, answer = mutated(manifest(), where)
        assert not is_gated(pod(stored), GATE_IMAGE)
        assert answer.warnings == (
            "the pod gets no gate, so gated nodes like a reject it: it is also eligible for b, "
            "which has no agent to open a gate; set a nodeSelector, or headroom.gpu/gated: 'true'",
        )

    def test_a_missing_image_is_reported(self) -> None:
        stored, answer = mutated(manifest(), around(node("a", "gated")))
        assert not is_gated(pod(stored), GATE_IMAGE)
        assert "set gate_image in Headroom's settings" in answer.warnings[0]

    def test_the_gate_is_moved_to_the_front_if_another_webhook_adds_a_container_before_it(
        self,
    ) -> None:
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
            pytest.param(
                {"env": [{"name": "HEADROOM_AGENT_PORT_NUMBER", "value": "1"}]}, id="a port"
            ),
            pytest.param({"volumeMounts": [{"name": "v", "mountPath": "/app"}]}, id="other files"),
            pytest.param({"ofTheFuture": True}, id="an unknown field"),
        ],
    )
    @pytest.mark.parametrize("wish", [None, "true", "false"])
    @pytest.mark.parametrize("placed", [{}, {"nodeName": "a"}, {"schedulerName": "other"}])
    def test_a_container_with_only_the_name_of_the_gate_is_replaced(
        self, other: dict[str, Any], wish: str | None, placed: dict[str, str]
    ) -> None:
        where = around(node("a", "gated"), gate_image=GATE_IMAGE)
        forged = {**gate_container(GATE_IMAGE), **other}
        annotations = {} if wish is None else {"headroom.gpu/gated": wish}
        obj = manifest(annotations=annotations, initContainers=[container("mesh", 0), forged])
        stored, _ = mutated(obj | {"spec": obj["spec"] | placed}, where)
        gate, mesh = stored["spec"]["initContainers"]
        assert gate == gate_container(GATE_IMAGE)
        assert mesh["name"] == "mesh"

    def test_the_gate_requests_cpu_and_memory_that_a_limit_range_may_require(self) -> None:
        """The gate does not request whole cores, because the CPU manager would assign them
        exclusively.
        """
        amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}
        main = container(resources={"limits": amounts, "requests": amounts})
        where = around(node("a", "gated"), gate_image=GATE_IMAGE)
        stored, _ = mutated(manifest("8Gi", main), where)
        most = {"cpu": "500m", "memory": "1Gi"}
        assert stored["spec"]["initContainers"][0]["resources"] == {
            "limits": most,
            "requests": most,
        }
        amounts = {"cpu": "250m", "memory": "1M", "nvidia.com/gpu": "1"}
        stored, _ = mutated(manifest("8Gi", container(resources={"requests": amounts})), where)
        own = stored["spec"]["initContainers"][0]["resources"]["requests"]
        assert own == {"cpu": "250m", "memory": "32Mi"}

    @pytest.mark.parametrize(
        ("before", "after"), [(None, "9410"), ("443", "443,9410"), ("9410,443", "9410,443")]
    )
    @pytest.mark.parametrize(
        "key",
        ["traffic.sidecar.istio.io/excludeOutboundPorts", "config.linkerd.io/skip-outbound-ports"],
    )
    def test_a_service_mesh_does_not_redirect_the_connections_of_the_gate(
        self, key: str, before: str | None, after: str
    ) -> None:
        """The CNI plugins of meshes redirect connections before their proxy runs."""
        where = around(node("a", "gated"), gate_image=GATE_IMAGE)
        obj = manifest(annotations={} if before is None else {key: before})
        stored, _ = mutated(obj, where)
        assert stored["metadata"]["annotations"][key] == after
