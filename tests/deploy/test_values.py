"""Checks that all values of the chart are described, that unknown values are rejected, and that
each value reaches its pods.
"""

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendered import CHART, NAMESPACE, Refused, objects, pod_specs, template

pytestmark = pytest.mark.slow

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
#: Maps each part of the chart's values to the objects whose pods it configures.
PARTS = {
    "scheduler": {"headroom-scheduler"},
    "webhook": {"headroom-webhook"},
    "console": {"headroom-console"},
    "recorder": {"headroom-recorder"},
    "deviceTaints": {"headroom-device-taints"},
    "certificates": {"headroom-certs", "headroom-certs-authority", "headroom-certs-first"},
    "agent": {"headroom-agent"},
}
#: Maps each part of the values that configures a container to its object and container.
CONTAINERS = {
    "extender": {("headroom-scheduler", "extender")},
    "kubeScheduler": {("headroom-scheduler", "kube-scheduler")},
    "webhook": {("headroom-webhook", "webhook")},
    "console": {("headroom-console", "console")},
    "recorder": {("headroom-recorder", "recorder")},
    "deviceTaints": {("headroom-device-taints", "device-taints")},
    "certificates": {(name, "certs") for name in PARTS["certificates"]},
    "agent": {("headroom-agent", "agent")},
}


#: Values with which the chart renders every part.
WHOLE: dict[str, Any] = {"deviceTaints": {"enabled": True}}


@functools.cache
def rendered() -> str:
    """Return the output of the chart with all parts and with images, but without other values."""
    with tempfile.TemporaryDirectory() as home:
        return template(Path(home), WHOLE)


def with_parts(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return values that render all parts, and add ``parts``."""
    merged = {part: {**WHOLE.get(part, {}), **values} for part, values in parts.items()}
    return {**WHOLE, **merged}


def templates(text: str) -> dict[str, dict[str, Any]]:
    """Return the pod templates by the name of their object. The name of the Job has no hash."""
    found = {}
    for (kind, _, name), each in objects(text).items():
        spec = each["spec"] if kind in ("Deployment", "DaemonSet", "Job", "CronJob") else {}
        spec = spec.get("jobTemplate", {"spec": spec})["spec"]
        if spec:
            found["headroom-certs-first" if kind == "Job" else name] = spec["template"]
    return found


def values_of(part: str) -> dict[str, Any]:
    """Return values for the pods of a part. They differ from the values of other parts."""
    toleration = {"key": "dedicated", "operator": "Equal", "value": part, "effect": "NoSchedule"}
    preferred = {
        "weight": 1,
        "preference": {"matchExpressions": [{"key": part, "operator": "Exists"}]},
    }
    node_affinity = {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
    values: dict[str, Any] = {
        "nodeSelector": {"pool": part},
        "tolerations": [toleration],
        "affinity": {"nodeAffinity": node_affinity},
        "podLabels": {"team": part, "app.kubernetes.io/name": "another"},
        "podAnnotations": {"example.com/scrape": part},
        "priorityClassName": f"class-{part}",
    }
    if part != "agent":
        values["topologySpreadConstraints"] = [spread(part)]
    return values


def spread(part: str) -> dict[str, Any]:
    return {"maxSkew": 1, "topologyKey": f"zone-{part}", "whenUnsatisfiable": "ScheduleAnyway"}


@functools.cache
def rendered_with_values_of_all_parts() -> str:
    with tempfile.TemporaryDirectory() as home:
        return template(Path(home), with_parts({part: values_of(part) for part in PARTS}))


@pytest.mark.parametrize("part", PARTS)
def test_values_of_a_part_reach_only_its_pods(part: str) -> None:
    before, after = templates(rendered()), templates(rendered_with_values_of_all_parts())
    assert after.keys() == before.keys() == set().union(*PARTS.values())
    for name in PARTS[part]:
        spec, metadata = after[name]["spec"], after[name]["metadata"]
        (toleration,) = values_of(part)["tolerations"]
        assert spec["nodeSelector"] == {"pool": part}
        assert spec["tolerations"] == [*before[name]["spec"].get("tolerations", []), toleration]
        for kind, default in before[name]["spec"].get("affinity", {}).items():
            assert spec["affinity"][kind].items() >= default.items()
        merged = spec["affinity"]["nodeAffinity"]
        preferred = "preferredDuringSchedulingIgnoredDuringExecution"
        assert merged[preferred] == values_of(part)["affinity"]["nodeAffinity"][preferred]
        assert metadata["labels"] == {**before[name]["metadata"]["labels"], "team": part}
        annotated = before[name]["metadata"].get("annotations", {})
        assert metadata["annotations"] == {**annotated, "example.com/scrape": part}
        assert spec["priorityClassName"] == f"class-{part}"
        if part != "agent":
            (constraint,) = spec["topologySpreadConstraints"]
            selected = constraint.pop("labelSelector")["matchLabels"]
            assert constraint == spread(part)
            assert selected
            assert selected.items() <= metadata["labels"].items()
        # All other fields are the same as without values.
        assert _without_values(after[name]) == _without_values(before[name])


def _without_values(pod: dict[str, Any]) -> dict[str, Any]:
    changed = {"nodeSelector", "tolerations", "affinity", "priorityClassName"}
    changed.add("topologySpreadConstraints")
    return {key: each for key, each in pod["spec"].items() if key not in changed}


@functools.cache
def rendered_with_values_of_all_containers() -> str:
    with tempfile.TemporaryDirectory() as home:
        return template(
            Path(home), with_parts({part: container_values(part) for part in CONTAINERS})
        )


def container_values(part: str) -> dict[str, Any]:
    """Return values for the containers of a part. They differ from the values of other parts."""
    number = list(CONTAINERS).index(part)
    return {
        "extraEnv": [
            {"name": f"TZ_{part}", "value": "UTC"},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "resources": {
            "requests": {"cpu": f"77{number}m"},
            "limits": {"memory": f"77{number}Mi"},
        },
    }


@pytest.mark.parametrize("part", CONTAINERS)
def test_values_of_a_container_reach_only_that_container(part: str) -> None:
    def containers(text: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {
            (name, each["name"]): each
            for name, pod in templates(text).items()
            for each in pod["spec"]["containers"]
        }

    before, after = containers(rendered()), containers(rendered_with_values_of_all_containers())
    assert after.keys() == before.keys() == set().union(*CONTAINERS.values())
    values = container_values(part)
    for key in CONTAINERS[part]:
        assert after[key].pop("env") == [*before[key].pop("env", []), *values["extraEnv"]]
        defaults, resources = before[key].pop("resources"), after[key].pop("resources")
        assert resources["requests"] == {
            **values["resources"]["requests"],
            "memory": defaults["requests"]["memory"],
        }
        assert resources["limits"] == values["resources"]["limits"]
        assert after[key] == before[key]


def test_every_pod_pulls_with_the_same_secrets(tmp_path: Path) -> None:
    for scheduler in ({}, {"defaultScheduler": {"enabled": True}}):
        text = template(tmp_path, {"imagePullSecrets": ["one", "two"], **scheduler})
        specs = pod_specs(objects(text))
        assert len(specs) == 8 + bool(scheduler)
        wanted = [{"name": "one"}, {"name": "two"}]
        assert {key for key, spec in specs.items() if spec["imagePullSecrets"] != wanted} == set()


def test_monitors_and_rules_have_the_labels_that_prometheus_selects(tmp_path: Path) -> None:
    on = {"enabled": True, "labels": {"release": "prom"}}
    account = {"namespace": "observability", "serviceAccount": "prom-prometheus"}
    values = {"monitors": {**on, "prometheus": account}, "rules": on}
    found = objects(template(tmp_path, values))
    selected = {
        key[0] for key, each in found.items() if each["metadata"]["labels"].get("release") == "prom"
    }
    assert selected == {"ServiceMonitor", "PrometheusRule"}
    (subject,) = found["ClusterRoleBinding", "", "headroom-metrics"]["subjects"]
    assert subject == {
        "kind": "ServiceAccount",
        "name": "prom-prometheus",
        "namespace": "observability",
    }


def test_prometheus_can_send_a_token_from_a_secret_instead_of_a_file(tmp_path: Path) -> None:
    values = {"monitors": {"enabled": True, "tokenSecret": "metrics-reader"}}
    found = objects(template(tmp_path, values))
    endpoints = [
        endpoint
        for key, each in found.items()
        if key[0] == "ServiceMonitor"
        for endpoint in each["spec"]["endpoints"]
    ]
    assert len(endpoints) == 6
    assert not [each for each in endpoints if "bearerTokenFile" in each]
    credentials = {"credentials": {"name": "metrics-reader", "key": "token"}}
    assert all(each.get("authorization") == credentials for each in endpoints)


def test_the_certificate_job_gets_a_new_name_when_it_changes(tmp_path: Path) -> None:
    def job(values: dict[str, Any]) -> dict[str, Any]:
        (found,) = [e for k, e in objects(template(tmp_path, values)).items() if k[0] == "Job"]
        return found

    first, again = job({}), job({"settings": {"policy": "spread"}})
    assert first == again
    assert "ttlSecondsAfterFinished" not in first["spec"]
    upgraded = job({"certificates": {"nodeSelector": {"a": "b"}}})
    assert upgraded["metadata"]["name"] != first["metadata"]["name"]
    assert upgraded["metadata"]["namespace"] == NAMESPACE


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"replica": 3}, "additional properties 'replica' not allowed"),
        ({"scheduler": {"replicas": 0}}, "at '/scheduler/replicas': minimum: got 0, want 1"),
        ({"agent": {"priviledged": True}}, "additional properties 'priviledged' not allowed"),
        (
            {"agent": {"steering": {"permited": True}}},
            "at '/agent/steering': additional properties",
        ),
        ({"agent": {"pools": [{"name": "canary"}]}}, "missing property 'nodeLabel'"),
        ({"webhook": {"extraEnv": [{"name": "A", "value": 1}]}}, "got number, want string"),
        ({"images": {"agent": "r.example/a:1"}}, "at '/images/agent': got string, want object"),
        ({"images": {"agent": {"digest": "sha256:12"}}}, "at '/images/agent/digest'"),
        ({"console": {"tolerations": [{"kee": "a"}]}}, "at '/console/tolerations/0'"),
        ({"monitors": True}, "at '/monitors': got boolean, want object"),
        ({"settings": {"mode": "observ"}}, "'/settings/mode': value must be one of 'enforce', 'o"),
        ({"settings": {"modes": "observe"}}, "additional properties 'modes' not allowed"),
        ({"settings": {"stale_after_s": "abc"}}, "at '/settings/stale_after_s': got string"),
        ({"settings": {"score_weights": {"slak": 1}}}, "additional properties 'slak' not"),
    ],
)
def test_unknown_values_are_rejected(values: dict[str, Any], shown: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        template(tmp_path, values)
    assert shown in str(refused.value)


def test_every_value_is_described_and_in_the_schema() -> None:
    text = (CHART / "values.yaml").read_text()
    described = 0
    for path, line, above in _values(text):
        assert above.lstrip().startswith("#"), f"{path}: no comment above: {line}"
        schema = _schema_of(path)
        assert len(schema["description"]) > 10, path
        described += 1
    assert described > 100
    for path in _schema_paths(SCHEMA):
        here: Any = yaml.safe_load(text)
        for name in path:
            here = here[name]  # A ``KeyError`` means that the value exists only in the schema.


def _values(text: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the path of each value, its line, and the line above."""
    lines = text.splitlines()
    path: list[str] = []
    for i, line in enumerate(lines):
        name, colon, _ = line.strip().partition(":")
        if not colon or line.lstrip().startswith("#"):
            continue
        path = [*path[: (len(line) - len(line.lstrip())) // 2], name]
        yield tuple(path), line, lines[i - 1]


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref", "").rpartition("/")[2]
    return SCHEMA["definitions"][reference] if reference else schema


def _schema_of(path: tuple[str, ...]) -> dict[str, Any]:
    here = SCHEMA
    for name in path:
        here = _resolved(here["properties"][name])
    return here


def _schema_paths(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, each in schema.get("properties", {}).items():
        resolved = _resolved(each)
        if name == "global":  # ``global`` belongs to Helm.
            continue
        yield (*path, name)
        if ("$ref" not in each and name != "settings") or name == "steering":
            yield from _schema_paths(resolved, (*path, name))
