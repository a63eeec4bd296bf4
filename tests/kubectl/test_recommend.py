"""Tests `kubectl headroom recommend`: the table, the settings, and the patches."""

import json
from typing import Any

from headroom.kubectl.recommend import patches, settings, table, totals

GIB = 1 << 30


def row(**changes: Any) -> dict[str, Any]:
    given = {
        "namespace": "team",
        "profile": "deployment-llm",
        "owner_kind": "Deployment",
        "owner_name": "llm",
        "family": False,
        "container": "main",
        "model": "NVIDIA L4",
        "program": "vLLM",
        "request_bytes": 9 * GIB,
        "missing": None,
        "message": "12 lives, 9 days; 0 of 9 were above the recommendation",
        "lives": 12,
        "span_s": 777600.0,
        "quantile_bytes": 8 * GIB,
        "highest_bytes": 8 * GIB,
        "above_ratio": 0.0,
        "tested": 9,
        "missed": 0,
        "self_sized": False,
        "setting": "",
        "pods": 3,
        "current_bytes": 16 * GIB,
        "reclaimable_bytes": 21 * GIB,
    }
    return given | changes


def body(*rows: dict[str, Any]) -> dict[str, Any]:
    teams = [{"namespace": "team", "reclaimable_bytes": 21 * GIB}]
    return {"recommendations": list(rows), "teams": teams}


FEW = row(
    owner_name="new",
    request_bytes=None,
    missing="few-lives",
    message="2 lives, 2 h: no recommendation yet; at least 3 lives are needed",
    quantile_bytes=None,
    highest_bytes=None,
    reclaimable_bytes=0,
)


def test_the_table_has_a_line_for_each_recommendation() -> None:
    found = table(body(row(), FEW, row(owner_name="small", reclaimable_bytes=-GIB)))
    assert found.rows[0] == (
        *("team", "deployment/llm", "main", "NVIDIA L4", "3"),
        *("16.0 GiB", "9.0 GiB", "21.0 GiB"),
        "12 lives, 9 days; 0 of 9 were above the recommendation",
    )
    assert found.rows[1][5:8] == ("16.0 GiB", "-", "-")
    assert found.bad == {2}
    assert found.total == ["lower requests would free 21.0 GiB"]
    wide = table(body(row()), wide=True)
    assert wide.rows[0][8:11] == ("8.0 GiB", "8.0 GiB", "vLLM")


def test_totals_are_shown_for_teams_and_for_accepting_all() -> None:
    one = {**body(row()), "accepted": {"message": "3 pods created again"}}
    assert totals(one) == ["If accepted: 3 pods created again"]
    teams = [
        {"namespace": "a", "reclaimable_bytes": GIB},
        {"namespace": "b", "reclaimable_bytes": 2 * GIB},
    ]
    assert totals({**body(row()), "teams": teams, "accepted": None}) == [
        "b would free 2.0 GiB",
        "a would free 1.0 GiB",
    ]


def test_settings_are_shown_once_for_each_owner() -> None:
    told = row(setting="vLLM takes the share that --gpu-memory-utilization sets.")
    assert settings(body(told, {**told, "model": "NVIDIA L40S"}, row())) == [
        "team deployment/llm: vLLM takes the share that --gpu-memory-utilization sets."
    ]


def test_the_patch_of_a_deployment_has_the_largest_request_of_all_models() -> None:
    lines = list(patches(body(row(), row(model="NVIDIA L40S", request_bytes=10 * GIB))))
    command, _, patch = lines[-1].partition(" -p ")
    assert command == "kubectl -n team patch deployment llm --type=merge"
    assert json.loads(patch.strip("'")) == {
        "spec": {"template": {"metadata": {"annotations": {"headroom.gpu/vram": "10Gi"}}}}
    }
    assert [line.startswith("#") for line in lines] == [True, True, False]


def test_without_recommendations_the_patch_is_a_comment() -> None:
    assert list(patches(body())) == [
        "# no memory peaks of containers are recorded: nothing to patch"
    ]


def test_a_patch_of_several_containers_names_them() -> None:
    (*_, last) = patches(body(row(), row(container="cache", request_bytes=3 << 29)))
    assert '"headroom.gpu/vram":"main=9Gi,cache=1536Mi"' in last


def test_a_patch_of_a_cron_job_applies_to_its_pods() -> None:
    (*_, last) = patches(body(row(owner_kind="CronJob", owner_name="nightly")))
    assert last.startswith("kubectl -n team patch cronjob nightly --type=merge -p '")
    path = json.loads(last.partition(" -p ")[2].strip("'"))
    template = path["spec"]["jobTemplate"]["spec"]["template"]
    assert template == {"metadata": {"annotations": {"headroom.gpu/vram": "9Gi"}}}


def test_without_enough_runs_or_a_template_there_are_only_comments() -> None:
    job = row(owner_kind="Job", owner_name="train", family=True)
    lines = list(patches(body(FEW, job)))
    assert lines == [
        "# team deployment/new: 2 lives, 2 h: no recommendation yet; at least 3 lives are needed",
        "# team job/train*, main on NVIDIA L4: "
        "12 lives, 9 days; 0 of 9 were above the recommendation",
        "#   set headroom.gpu/vram: 9Gi in its manifest",
    ]
    one_missing = list(patches(body(row(), {**FEW, "owner_name": "llm", "container": "cache"})))
    assert len(one_missing) == 1
