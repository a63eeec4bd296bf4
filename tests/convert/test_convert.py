"""Converts manifests for KAI, HAMi and gpushare, and checks the results with the parsers that the
cluster uses.
"""

import contextlib
import copy
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headroom.commands import app
from headroom.contract.annotations import Bytes, ReplicaShare, Share
from headroom.contract.kube import Pod
from headroom.convert.findings import Outcome
from headroom.convert.manifests import TEMPLATES, BadManifest, Options, convert
from headroom.core.cluster.trackers.foreign_allocators import of_pod
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest, understand
from tests.examples import examples

GOLDEN = Path(__file__).parent / "golden"
MIB = 1 << 20
#: Settings without a deadline, because the YAML parser, which keeps comments, is slow.
SLOW_YAML = settings(max_examples=examples(75), deadline=None)
VRAM = "headroom.gpu/vram"


def asked(manifest: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return the amount and the number of devices of each container, as the extender parses
    them.
    """
    pod = msgspec.convert({"spec": {}, **manifest, "metadata": manifest["metadata"]}, Pod)
    request = understand(pod, None, Rules())
    assert isinstance(request, VramRequest), request
    return {ask.name: (ask.amount, ask.count) for ask in request.containers}


def kai(*names: str, **annotations: str) -> str:
    written = {key.replace("_", "-"): value for key, value in annotations.items()}
    return pod_of({"annotations": written}, *({"name": name} for name in names or ("main",)))


def limits(*asks: dict[str, Any]) -> str:
    containers = [{"name": f"c{i}", "resources": {"limits": ask}} for i, ask in enumerate(asks)]
    return pod_of({}, *containers)


def pod_of(metadata: dict[str, Any], *containers: dict[str, Any], **spec: Any) -> str:
    metadata = {"name": "p", **metadata}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    return yaml.safe_dump({**manifest, "spec": {"containers": list(containers), **spec}})


def converted(text: str, **options: Any) -> dict[str, Any]:
    result = convert(text, Options(**options))
    assert result.understood, result.findings
    manifest: dict[str, Any] = yaml.safe_load(result.text)
    return manifest


def command(file: str, text: str = "") -> Result:
    with contextlib.chdir(GOLDEN):
        return CliRunner().invoke(app, ["convert", "-f", file], input=text)


@pytest.mark.parametrize("name", ["kai", "hami", "gpushare", "unclear"])
def test_files_are_converted_as_expected(name: str) -> None:
    result = command(f"{name}.yaml")
    assert result.stdout == (GOLDEN / f"{name}.out.yaml").read_text()
    assert result.stderr == (GOLDEN / f"{name}.said.txt").read_text()
    assert result.exit_code == (0 if name == "gpushare" else 1)


@pytest.mark.parametrize("name", ["kai", "hami", "gpushare"])
def test_converting_a_converted_file_changes_nothing(name: str) -> None:
    once = (GOLDEN / f"{name}.out.yaml").read_text()
    again = convert(once, Options())
    assert again.text == once
    assert {finding.outcome for finding in again.findings} <= {Outcome.LOST}


@SLOW_YAML
@given(units=st.integers(1, 1 << 18), unit=st.sampled_from([1 << 20, 1 << 30]))
def test_gpushare_units_are_the_plugins(units: int, unit: int) -> None:
    if units * unit >= 1 << 40:
        units = 1
    pod = converted(limits({"aliyun.com/gpu-mem": units}), memory_unit_bytes=unit)
    assert asked(pod) == {"c0": (Bytes(units * unit), 1)}
    assert isinstance(pod["metadata"]["annotations"][VRAM], str)


@SLOW_YAML
@given(mib=st.integers(1, (1 << 20) - 1), devices=st.integers(1, 16), as_text=st.booleans())
def test_hami_and_kai_count_mebibytes_on_each_device(mib: int, devices: int, as_text: bool) -> None:
    value = str(mib) if as_text else mib
    pod = converted(limits({"nvidia.com/gpumem": value, "nvidia.com/gpu": devices}))
    assert asked(pod) == {"c0": (Bytes(mib * MIB), devices)}
    pod = converted(kai(gpu_memory=str(mib), gpu_fraction_num_devices=str(devices)))
    assert asked(pod) == {"main": (Bytes(mib * MIB), devices)}


@SLOW_YAML
@given(st.decimals(min_value="0.000001", max_value=1, places=9).filter(lambda d: d > 0))
def test_a_fraction_is_never_rounded_down(fraction: Any) -> None:
    pod = converted(kai(gpu_fraction=f"{fraction:f}"))
    ((amount, count),) = asked(pod).values()
    assert isinstance(amount, Share)
    assert count == 1
    excess = Fraction(amount.ppm, 1_000_000) - Fraction(fraction)
    assert 0 <= excess < Fraction(1, 1_000_000)


@SLOW_YAML
@given(st.lists(st.one_of(st.none(), st.integers(1, 64)), min_size=1, max_size=4))
def test_each_container_keeps_its_own_amount(sizes: list[int | None]) -> None:
    text = limits(*({} if size is None else {"nvidia.com/gpumem": size} for size in sizes))
    pod = converted(text)
    wanted = {f"c{i}": (Bytes(s * MIB), 1) for i, s in enumerate(sizes) if s is not None}
    assert asked(pod) == wanted


def test_a_container_without_an_amount_does_not_get_another_containers() -> None:
    pod = converted(limits({"nvidia.com/gpumem": 1024}, {"nvidia.com/gpu": 1}))
    assert pod["metadata"]["annotations"] == {VRAM: "c0=1Gi"}
    assert asked(pod)["c1"] == (ReplicaShare(), 1)


@pytest.mark.parametrize("kind", list(TEMPLATES))
def test_every_kind_with_a_pod_template_is_converted(kind: str) -> None:
    pod = yaml.safe_load(kai(gpu_memory="1024"))
    body: dict[str, Any] = {"metadata": pod["metadata"], "spec": pod["spec"]}
    for key in reversed(TEMPLATES[kind]):
        body = {key: body}
    result = convert(yaml.safe_dump({"kind": kind, **body}), Options())
    assert result.understood
    out = yaml.safe_load(result.text)
    for key in TEMPLATES[kind]:
        out = out[key]
    assert asked(out) == {"main": (Bytes(1 << 30), 1)}


def test_annotations_written_by_another_allocator_are_removed() -> None:
    """A bound pod with such an annotation would make Headroom reject all pods on its node."""
    stamps = {"hami.io/vgpu-devices-allocated": "GPU-0,NVIDIA,1,1:;", "ALIYUN_COM_GPU_MEM_IDX": "0"}
    text = pod_of(
        {"annotations": stamps, "labels": {"runai-gpu-group": "g", "app": "a"}},
        {"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": 1}}},
        nodeName="n",
    )
    assert of_pod(msgspec.convert(yaml.safe_load(text), Pod))
    out = converted(text)
    assert of_pod(msgspec.convert(out, Pod)) == set()
    assert out["metadata"]["labels"] == {"app": "a"}


def test_a_custom_scheduler_is_kept_and_another_can_be_given() -> None:
    own = pod_of({"annotations": {"gpu-memory": "1"}}, {"name": "main"}, schedulerName="mine")
    assert converted(own)["spec"]["schedulerName"] == "mine"
    assert converted(own, scheduler_name="headroom")["spec"]["schedulerName"] == "headroom"
    whole = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    theirs = pod_of({}, whole, schedulerName="kai-scheduler")
    assert "schedulerName" not in converted(theirs)["spec"]
    mlu = {"name": "main", "resources": {"limits": {"cambricon.com/vmlu": 1}}}
    other = pod_of({}, mlu, schedulerName="hami-scheduler")
    assert converted(other, scheduler_name="headroom")["spec"]["schedulerName"] == "hami-scheduler"


def test_gpushare_compute_settings_are_removed_with_its_plugin() -> None:
    pod = converted(limits({"aliyun.com/gpu-mem": 3, "aliyun.com/gpu-core.percentage": 30}))
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(kai(gpu_fraction="0"), "gpu-fraction: '0' is not a fraction", id="zero"),
        pytest.param(kai(gpu_fraction="half"), "gpu-fraction: 'half' is not", id="a word"),
        pytest.param(kai(gpu_fraction="."), "gpu-fraction: '.' is not", id="a point"),
        pytest.param(
            kai(gpu_memory="8Gi"),
            "gpu-memory: '8Gi' MiB is more than any device has; the value is in MiB. Example: 8192",
            id="two units",
        ),
        pytest.param(
            limits({"aliyun.com/gpu-mem": 8138}),
            "aliyun.com/gpu-mem: '8138' GiB is more than any device has; the value is in GiB. "
            "Example: 8. Set its unit with --memory-unit",
            id="MiB instead of GiB",
        ),
        pytest.param(
            limits({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000}),
            "volcano.sh/vgpu-memory: Volcano is not converted, only KAI, HAMi and gpushare",
            id="Volcano",
        ),
        pytest.param(kai(gpu_memory="0"), "gpu-memory is 0", id="no memory"),
        pytest.param(kai(gpu_memory="-5"), "gpu-memory: '-5'", id="negative"),
        pytest.param(
            kai(gpu_memory="5", gpu_fraction="0.5"),
            "both gpu-fraction and gpu-memory",
            id="fraction and memory",
        ),
        pytest.param(
            kai(gpu_memory="5", gpu_fraction_num_devices="all"),
            "not a number of devices",
            id="invalid count",
        ),
        pytest.param(
            kai(gpu_memory="5", gpu_fraction_container_name="x"),
            "names no container",
            id="unknown container",
        ),
        pytest.param(
            kai(gpu_fraction_num_devices="2"), "without gpu-fraction", id="count without a fraction"
        ),
        pytest.param(
            limits({"nvidia.com/gpumem": 1}, {"aliyun.com/gpu-mem": 1}),
            "it requests memory from HAMi and gpushare",
            id="two allocators",
        ),
        pytest.param(
            limits({"nvidia.com/gpu": 1, "aliyun.com/gpu-mem": 1}),
            "requests nvidia.com/gpu and a part of a GPU",
            id="whole and shared GPU",
        ),
        pytest.param(
            pod_of({"annotations": {"gpu-memory": "5", VRAM: "8Gi"}}, {"name": "main"}),
            "it already has annotation headroom.gpu/vram",
            id="already with our annotation",
        ),
        pytest.param(
            pod_of({"annotations": {"nvidia.com/container.main.new-thing": "5"}}, {"name": "main"}),
            "nvidia.com/container.main.new-thing is not known",
            id="unknown annotation",
        ),
        pytest.param(limits({"aliyun.com/gpu-count": 2}), "aliyun.com/gpu-count", id="gpu-count"),
        pytest.param(
            "kind: Pod\nmetadata:\n  annotations: &a {gpu-memory: '5'}\nother: *a\n",
            "alias",
            id="a YAML alias of two manifests",
        ),
        pytest.param("kind: Pod\nspec: [1]\n", "no pod template", id="no spec"),
    ],
)
def test_unknown_settings_stay_unchanged(text: str, says: str) -> None:
    result = convert(text, Options())
    assert result.text == text
    assert not result.understood
    assert says in " ".join(finding.message for finding in result.findings)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("a: {{ .Values.x }}\n", "line 1: ", id="a Helm template"),
        pytest.param("a: [1\n", "line ", id="not YAML"),
        pytest.param("a: 1\na: 2\n", "line 2: ", id="a repeated key"),
        pytest.param("- 1\n", "document 1 is not a Kubernetes object", id="a list"),
        pytest.param("kind: Pod\n---\nhello\n", "document 2 is no", id="a word"),
    ],
)
def test_a_file_without_a_manifest_stays_unchanged(text: str, says: str) -> None:
    with pytest.raises(BadManifest, match=re.escape(says)):
        convert(text, Options())


def test_an_invalid_file_gives_a_one_line_error() -> None:
    result = command("-", "a: [1\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"headroom: <stdin>: line [0-9]+: is not YAML: [^\n]+\n", result.stderr)


@SLOW_YAML
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "kind",
                        "metadata",
                        "spec",
                        "template",
                        "containers",
                        "name",
                        "annotations",
                        "labels",
                        "resources",
                        "limits",
                        "items",
                        "gpu-fraction",
                        "nvidia.com/gpumem",
                        "env",
                    ]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
def test_unusual_objects_never_cause_a_crash(inner: Any) -> None:
    for document in ({"kind": "Pod", "spec": inner}, {"kind": "List", "items": inner}, inner):
        try:
            convert(yaml.safe_dump(document), Options())
        except BadManifest:
            continue


def parts(of: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each part of a manifest."""
    yield path
    items = of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ()
    for key, value in items:
        yield from parts(value, (*path, key))


def replaced(of: Any, path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    changed = copy.copy(of)
    changed[path[0]] = replaced(of[path[0]], path[1:], value)
    return changed


SELECTING = """
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  nodeSelector: {gpushare: "true"}
  containers: [{name: main, resources: {limits: {aliyun.com/gpu-mem: 3}}}]
"""
GPUSHARE = list(yaml.safe_load_all((GOLDEN / "gpushare.yaml").read_text() + "---" + SELECTING))


@pytest.mark.parametrize("value", [None, True, "x", [1]], ids=repr)
def test_a_part_of_another_type_never_causes_a_crash(value: object) -> None:
    for document in GPUSHARE:
        for path in parts(document):
            with contextlib.suppress(BadManifest):
                convert(yaml.safe_dump(replaced(document, path, value)), Options())


def test_stdin_and_a_file_without_anything_to_convert_are_output_unchanged() -> None:
    text = "# only a\nkind:   ConfigMap   \nmetadata: {name: a}\n---\n---\n"
    result = command("-", text)
    assert (result.exit_code, result.stdout, result.stderr) == (0, text, "")
