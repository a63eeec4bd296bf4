"""Checks that a conversion reports everything that it changes or drops."""

from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headroom.commands import app
from headroom.convert.findings import Outcome
from headroom.convert.manifests import Options, convert

CHANGED, LOST, NOT_UNDERSTOOD = Outcome
GPU, MEMORY, PERCENT = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage"
HAMI = {GPU: 1, MEMORY: 4096}
KAI = {"gpu-memory": "4096"}


def pod(
    limits: dict[str, Any],
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    container = {
        "name": "main",
        "resources": {"limits": limits},
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "annotations": annotations or {}, "labels": labels or {}},
        "spec": {"containers": [container], **spec},
    }


def job(labels: dict[str, str], template: dict[str, Any]) -> dict[str, Any]:
    inner = {"metadata": template["metadata"], "spec": template["spec"]}
    metadata = {"name": "j", "labels": labels}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"template": inner},
    }


@pytest.mark.parametrize(
    ("given", "outcome", "says"),
    [
        # HAMi
        pytest.param(
            pod({**HAMI, PERCENT: 50}),
            CHANGED,
            f"{PERCENT}: 50: removed, because HAMi uses {MEMORY}",
            id="HAMi, both amounts",
        ),
        pytest.param(
            pod({GPU: 1, PERCENT: 0}), CHANGED, f"{PERCENT}: 0: HAMi", id="HAMi, 0 percent"
        ),
        pytest.param(
            pod({GPU: 1, MEMORY: 0}), CHANGED, f"{MEMORY}: 0: HAMi sets no", id="HAMi, 0 MiB"
        ),
        pytest.param(
            pod({GPU: 1, "nvidia.com/gpucores": 30}),
            CHANGED,
            "no amount of memory: HAMi sets no limit, or its defaultMemory",
            id="HAMi, no amount",
        ),
        pytest.param(
            pod({GPU: 1}, schedulerName="hami-scheduler"),
            CHANGED,
            "container main: HAMi gives it a whole GPU; on a shared GPU, Headroom reserves",
            id="HAMi, a whole GPU",
        ),
        pytest.param(
            pod({**HAMI, "nvidia.com/gpucores": 0}),
            CHANGED,
            "nvidia.com/gpucores: 0: removed, because it requests nothing",
            id="HAMi, no cores",
        ),
        pytest.param(
            pod({**HAMI, "nvidia.com/gpucores": 100}),
            LOST,
            "nvidia.com/gpucores: 100 keeps other pods off the GPU in HAMi",
            id="HAMi, all cores",
        ),
        pytest.param(
            pod({GPU: 1, "nvidia.com/gpucores": 100}),
            CHANGED,
            "nvidia.com/gpucores: 100: removed, because no other pod has memory",
            id="HAMi, all cores of a whole GPU",
        ),
        pytest.param(
            pod({**HAMI, "nvidia.com/priority": 1}), LOST, "no priority between pods", id="priority"
        ),
        pytest.param(
            pod(HAMI, {"nvidia.com/use-gpuuuid": " ,"}),
            CHANGED,
            "nvidia.com/use-gpuuuid: removed, because it is empty and has no effect",
            id="HAMi, an empty selector",
        ),
        pytest.param(
            pod(HAMI, {"nvidia.com/use-gpuindexes": "0,1"}),
            LOST,
            "nvidia.com/use-gpuindexes: a pod cannot choose a device by its index",
            id="HAMi, an index",
        ),
        pytest.param(
            pod(HAMI, {"hami.io/gpu-scheduler-policy": "mutex"}),
            LOST,
            "headroom.gpu/vram: 100% reserves all memory of a GPU",
            id="HAMi, mutex",
        ),
        pytest.param(
            pod(HAMI, {"hami.io/gpu-scheduler-policy": "binpack"}),
            LOST,
            "headroom.gpu/policy: pack or spread does this for nodes",
            id="HAMi, the policy for GPUs",
        ),
        pytest.param(
            pod(HAMI, {"hami.io/node-scheduler-policy": "binpack"}),
            CHANGED,
            "hami.io/node-scheduler-policy: binpack: replaced by headroom.gpu/policy: pack",
            id="HAMi, the policy for nodes",
        ),
        pytest.param(
            pod(HAMI, {"hami.io/something-new": "x"}),
            LOST,
            "hami.io/something-new: only HAMi reads it; it was kept",
            id="HAMi, an unknown annotation",
        ),
        pytest.param(
            pod(HAMI, labels={"hami.io/webhook": "ignore"}),
            LOST,
            "hami.io/webhook: only HAMi reads it; it was kept",
            id="HAMi, a label",
        ),
        pytest.param(
            pod(HAMI, env={"CUDA_OVERSUBSCRIBE": "true"}),
            LOST,
            "CUDA_OVERSUBSCRIBE: only HAMi's library in the container reads the variable",
            id="HAMi, a variable",
        ),
        pytest.param(
            pod(HAMI, nodeSelector={"gpu": "on"}),
            LOST,
            "nodeSelector gpu: on: marks nodes of HAMi; remove it",
            id="HAMi, its nodes",
        ),
        pytest.param(
            pod({**HAMI, "nvidia.com/gpu-things": 1}),
            LOST,
            "nvidia.com/gpu-things: NVIDIA's device plugin does not offer it",
            id="HAMi, a resource of its configuration",
        ),
        pytest.param(
            pod(HAMI, {"hami.io/vgpu-node": "n"}),
            CHANGED,
            "hami.io/vgpu-node: removed; another allocator writes it when it places a pod",
            id="HAMi, of a placed pod",
        ),
        pytest.param(
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "q"},
                "spec": {"hard": {"limits.nvidia.com/gpumem": 3000}},
            },
            NOT_UNDERSTOOD,
            "limits.nvidia.com/gpumem: not in a pod template",
            id="HAMi, a quota",
        ),
        # KAI
        pytest.param(
            job({"kai.scheduler/queue": "team"}, pod({}, KAI)),
            LOST,
            "kai.scheduler/queue: Headroom has no queues; it was kept",
            id="KAI, the queue of a workload",
        ),
        pytest.param(
            pod({}, {**KAI, "kai.scheduler/topology": "rack"}),
            LOST,
            "kai.scheduler/topology: only KAI reads it; it was kept",
            id="KAI, topology",
        ),
        pytest.param(
            pod({GPU: 1}, schedulerName="kai-scheduler"),
            CHANGED,
            "container main: KAI gives it a whole GPU",
            id="KAI, a whole GPU",
        ),
        pytest.param(
            pod({}, KAI, priorityClassName="train"),
            LOST,
            "priorityClassName: train: KAI installs it",
            id="KAI, a PriorityClass",
        ),
        pytest.param(
            {"apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": "team"}},
            LOST,
            "only KAI reads objects of scheduling.run.ai/v2; it was kept",
            id="KAI, a queue",
        ),
        # gpushare
        pytest.param(
            pod({"aliyun.com/gpu-mem": 0}),
            CHANGED,
            "aliyun.com/gpu-mem: 0: removed, because it requests nothing",
            id="gpushare, nothing",
        ),
        pytest.param(
            pod({"aliyun.com/gpu-mem": 2}, nodeSelector={"gpushare": "true"}),
            LOST,
            "nodeSelector gpushare: true: marks nodes of gpushare; remove it",
            id="gpushare, its nodes",
        ),
    ],
)
def test_changed_and_dropped_settings_are_reported(
    given: dict[str, Any], outcome: Outcome, says: str
) -> None:
    result = convert(yaml.safe_dump(given), Options())
    found = [each.outcome for each in result.findings if says in each.message]
    assert found == [outcome], [each.message for each in result.findings]
    assert result.complete == all(each.outcome is CHANGED for each in result.findings)


def test_a_template_that_no_pod_uses_any_more_is_reported() -> None:
    exactly = {"deviceClassName": "gpu.nvidia.com", "capacity": {"requests": {"memory": "4Gi"}}}
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t"},
        "spec": {"spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}},
    }
    claim = {"name": "g", "resourceClaimTemplateName": "t"}
    user = pod({}, resourceClaims=[claim])
    user["spec"]["containers"][0]["resources"] = {"claims": [{"name": "g"}]}
    result = convert(yaml.safe_dump_all([template, user]), Options())
    (found,) = result.findings
    assert (found.outcome, found.where) == (CHANGED, "ResourceClaimTemplate t")
    assert found.message == "removed, because no pod in the file uses it any more"


@pytest.mark.parametrize(
    ("given", "exit_code"),
    [
        pytest.param(pod(HAMI), 0, id="everything"),
        pytest.param(pod({**HAMI, PERCENT: 50}), 0, id="equivalent settings"),
        pytest.param(pod({**HAMI, "nvidia.com/gpucores": 30}), 1, id="a part of the cores"),
        pytest.param(pod({GPU: 1, PERCENT: 101}), 1, id="an impossible amount"),
        pytest.param(pod({GPU: 1}), 0, id="nothing to convert"),
    ],
)
def test_the_exit_status_is_1_if_something_cannot_be_expressed(
    given: dict[str, Any], exit_code: int
) -> None:
    result = CliRunner().invoke(app, ["convert", "-f", "-"], input=yaml.safe_dump(given))
    assert result.exit_code == exit_code, result.stderr


def test_a_pod_for_nvidias_plugin_has_no_findings() -> None:
    plain = pod({GPU: 1, "nvidia.com/mig-1g.10gb": 1, "nvidia.com/gpu.shared": 1})
    text = yaml.safe_dump(plain)
    assert convert(text, Options()).findings == ()
    assert convert(text, Options()).text == text
