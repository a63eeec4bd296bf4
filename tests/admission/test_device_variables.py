"""Tests the environment variables that give a pod its devices and limit its share of a device."""

from typing import Any

import pytest

from headroom.contract.gpunode import Replicas
from tests.admission.reviews import (
    around,
    container,
    manifest,
    mutated,
    node,
)
from tests.builders import GIB, mig, shared

LIMIT = "headroom.gpu/vram-limit"


def env_of(obj: dict[str, Any], name: str = "main") -> dict[str, Any]:
    """Return the value of each variable, or the annotation from which the variable takes
    its value.
    """
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


class TestShare:
    def test_variables_follow_the_placement_annotation(self) -> None:
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

    def test_a_pod_with_a_limit_gets_variables_for_its_limit(self) -> None:
        plain = manifest(annotations={"headroom.gpu/share": "env"})
        limited = manifest(annotations={"headroom.gpu/share": "env", LIMIT: "20Gi"})
        stored, _ = mutated(limited, around())
        assert env_of(stored) == env_of(mutated(plain, around())[0]) | {
            "HEADROOM_VRAM_LIMIT_BYTES": follows("limit-bytes.0"),
            "HEADROOM_VRAM_LIMIT_FRACTION": follows("limit-fraction.0"),
        }
        assert mutated(stored, around())[0] == stored

    def test_a_namespace_may_enable_it_and_a_pod_may_disable_it(self) -> None:
        where = around(annotations={"headroom.gpu/share": "env"})
        assert len(env_of(mutated(manifest(), where)[0])) == 2
        declined = manifest(annotations={"headroom.gpu/share": "none"})
        assert env_of(mutated(declined, where)[0]) == {}

    CAPABLE = node("a", driver="615.10", strategy="cdi-annotations,cdi-cri", limits="ok")

    @pytest.mark.parametrize(
        ("vram", "nodes", "mib"),
        [
            pytest.param("8Gi", (CAPABLE,), "8192", id="supported"),
            pytest.param("8G", (CAPABLE,), "7629", id="rounded down"),
            pytest.param("25%", (CAPABLE,), None, id="unknown share"),
            pytest.param("1Ki", (CAPABLE,), None, id="less than a MiB"),
            pytest.param("8Gi", (CAPABLE, node("b")), None, id="another node does not support it"),
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
    def test_the_limit_of_the_driver_is_set_if_it_is_known(
        self, vram: str, nodes: tuple[Any, ...], mib: str | None
    ) -> None:
        obj = manifest(vram, annotations={"headroom.gpu/share": "limit"})
        stored, answer = mutated(obj, around(*nodes))
        env = env_of(stored)
        assert env.get("NVIDIA_GPU_MEMORY_LIMIT") == env.get("NVIDIA_GPU_MEMORY_REQUEST") == mib
        unlimited = [each for each in answer.warnings if "nothing can limit the pod" in each]
        has_amount = not vram.endswith("%")
        missing = "not every eligible node can" if has_amount else "it needs an amount, for example"
        assert [missing in each for each in unlimited] == ([True] if mib is None else [])

    @pytest.mark.parametrize(
        ("limit", "hard", "soft"),
        [
            pytest.param("20Gi", "20480", "8192", id="burstable"),
            pytest.param("8Gi", "8192", "8192", id="guaranteed"),
            pytest.param("none", "8192", "8192", id="none"),
            pytest.param("50%", None, None, id="share"),
        ],
    )
    def test_the_driver_gets_the_limit_of_the_pod(
        self, limit: str, hard: str | None, soft: str | None
    ) -> None:
        wishes = {"headroom.gpu/share": "limit", "headroom.gpu/vram-limit": limit}
        stored, answer = mutated(manifest(annotations=wishes), around(self.CAPABLE))
        env = env_of(stored)
        found = env.get("NVIDIA_GPU_MEMORY_LIMIT"), env.get("NVIDIA_GPU_MEMORY_REQUEST")
        assert found == (hard, soft)
        assert ["it needs an amount" in each for each in answer.warnings] == [True] * (hard is None)

    def test_the_driver_gets_the_limit_of_the_namespace(self) -> None:
        where = around(self.CAPABLE, annotations={"headroom.gpu/default-vram-limit": "12Gi"})
        stored, _ = mutated(manifest(annotations={"headroom.gpu/share": "limit"}), where)
        env = env_of(stored)
        assert env["NVIDIA_GPU_MEMORY_LIMIT"] == "12288"
        assert env["NVIDIA_GPU_MEMORY_REQUEST"] == "8192"
        assert mutated(stored, where)[0] == stored

    @pytest.mark.parametrize("own", ["NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"])
    def test_a_limit_set_by_the_user_stays_alone(self, own: str) -> None:
        obj = manifest("8Gi", container(env=[{"name": own, "value": "100"}]))
        obj["metadata"]["annotations"]["headroom.gpu/share"] = "limit"
        env = env_of(mutated(obj, around(self.CAPABLE))[0])
        assert {name for name in env if name.startswith("NVIDIA_GPU")} == {own}

    @pytest.mark.parametrize(
        ("vram", "processes", "gpus", "mps"),
        [
            pytest.param("4Gi", "1", 1, "0=4096M", id="lower"),
            pytest.param("6Gi", "1", 1, None, id="equal to the plugin's"),
            pytest.param("8Gi", "1", 1, None, id="higher"),
            pytest.param("8Gi", "4", 1, "0=2048M", id="each process"),
            pytest.param("4Gi", "1", 2, None, id="two devices are not distinguished"),
        ],
    )
    def test_the_limit_of_mps_is_set_if_it_is_lower_than_the_plugins(
        self, vram: str, processes: str, gpus: int, mps: str | None
    ) -> None:
        each = shared("GPU-a", sharing="mps", memory_bytes=24 * GIB, replicas=Replicas(free=4))
        wishes = {"headroom.gpu/share": "limit", "headroom.gpu/processes": processes}
        obj = manifest(vram, container(gpus=gpus), annotations=wishes)
        stored, _ = mutated(obj, around(node(devices=[each])))
        assert env_of(stored).get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") == mps
        obj = manifest("1Gi", container(gpus=gpus), annotations={**wishes, LIMIT: vram})
        stored, _ = mutated(obj, around(node(devices=[each])))
        assert env_of(stored).get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") == mps
