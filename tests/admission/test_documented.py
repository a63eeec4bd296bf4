"""Checks that docs/design/admission.md lists all changes and errors, word for word.

``python -m tests.admission.test_documented`` writes the sentences into the page.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headroom.contract.annotations import (
    DEFAULT_VRAM,
    EXTENDER_ANNOTATION_PREFIXES,
    EXTENDER_ANNOTATIONS,
    MAX_VRAM_LIMIT,
    PREFIX,
    SCHEDULER,
    USER_ANNOTATIONS,
    VRAM,
)
from headroom.contract.gate import GATE, gate_container
from headroom.core.placement.policy import Rules
from headroom.webhook import mutation
from headroom.webhook.context import AdmissionContext
from headroom.webhook.review import answer_mutate, answer_validate, read
from tests.admission.reviews import GATE_IMAGE, around, container, manifest, node, review

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/design/admission.md"
BEGIN, END = "<!-- sentences -->", "<!-- end of sentences -->"


def annotated(**of_users: str) -> dict[str, Any]:
    given = {PREFIX + key.replace("_", "-"): text for key, text in of_users.items()}
    return manifest(None, annotations=given)


def owned(obj: dict[str, Any], **annotations: str) -> dict[str, Any]:
    template = {key: obj[key] for key in ("metadata", "spec")}
    given = {PREFIX + key: text for key, text in annotations.items()}
    return {"metadata": {"annotations": given}, "spec": {"template": template}}


def labelled() -> dict[str, Any]:
    obj = manifest(None)
    obj["metadata"]["labels"]["headroom.gpu/vram"] = "8Gi"
    return obj


NOTHING = around()
STRICT = AdmissionContext(Rules(reject_unannotated=True), NOTHING.settings, NOTHING.namespace)
MIXED = around(node("a", "gated"), node("b", devices=None), gate_image=GATE_IMAGE)
#: Each case has a title, the kind of the written object, the object, and the existing objects.
CASES: list[tuple[str, str, dict[str, Any], AdmissionContext]] = [
    ("`headroom.gpu/vram: 8GB`", "Pod", annotated(vram="8GB"), NOTHING),
    ("`headroom.gpu/vram: 0`", "Pod", annotated(vram="0"), NOTHING),
    ("`headroom.gpu/vram: 120%`", "Pod", annotated(vram="120%"), NOTHING),
    ("`headroom.gpu/vram: mian=8Gi`", "Pod", annotated(vram="mian=8Gi"), NOTHING),
    ("`headroom.gpu/vram: auto,least=2Gi`", "Pod", annotated(vram="auto,least=2Gi"), NOTHING),
    ("`headroom.gpu/vram: auto`", "Pod", annotated(vram="auto"), NOTHING),
    (
        "`headroom.gpu/vram: 8Gi`, `headroom.gpu/vram-limit: 4Gi`",
        "Pod",
        annotated(vram="8Gi", vram_limit="4Gi"),
        NOTHING,
    ),
    ("`headroom.gpu/vram-limit: 20Gi` alone", "Pod", annotated(vram_limit="20Gi"), NOTHING),
    (
        "`headroom.gpu/vram-limit: mian=20Gi`",
        "Pod",
        annotated(vram="8Gi", vram_limit="mian=20Gi"),
        NOTHING,
    ),
    (
        "`headroom.gpu/vram-limit: 30Gi`, and a maximum of its namespace",
        "Pod",
        annotated(vram="8Gi", vram_limit="30Gi"),
        around(annotations={MAX_VRAM_LIMIT: "20Gi"}),
    ),
    (
        "`headroom.gpu/vram-limit: none`, and a maximum of its namespace",
        "Pod",
        annotated(vram="8Gi", vram_limit="none"),
        around(annotations={MAX_VRAM_LIMIT: "20Gi"}),
    ),
    (
        "nothing, and a maximum of its namespace",
        "Pod",
        manifest(None),
        around(annotations={MAX_VRAM_LIMIT: "20Gi"}),
    ),
    ("`headroom.gpu/policy: dense`", "Pod", annotated(vram="8Gi", policy="dense"), NOTHING),
    ("`headroom.gpu/max-sm: 70`", "Pod", annotated(vram="8Gi", max_sm="70"), NOTHING),
    ("`headroom.gpu/startup: first`", "Pod", annotated(vram="8Gi", startup="first"), NOTHING),
    (
        "`headroom.gpu/startup-timeout: 10`",
        "Pod",
        annotated(vram="8Gi", startup="alone", **{"startup-timeout": "10"}),
        NOTHING,
    ),
    (
        "`headroom.gpu/on-overuse: never`",
        "Pod",
        annotated(vram="8Gi", **{"on-overuse": "never"}),
        NOTHING,
    ),
    ("`headroom.gpu/processes: 0`", "Pod", annotated(vram="8Gi", processes="0"), NOTHING),
    ("`headroom.gpu/gated: yes`", "Pod", annotated(vram="8Gi", gated="yes"), NOTHING),
    ("`headroom.gpu/share: cap`", "Pod", annotated(vram="8Gi", share="cap"), NOTHING),
    ('`gated: "true"`, no `gate_image`', "Pod", annotated(vram="8Gi", gated="true"), NOTHING),
    (
        '`gated: "true"`, another scheduler',
        "Pod",
        {**(g := annotated(vram="8Gi", gated="true")), "spec": g["spec"] | {"schedulerName": "x"}},
        around(gate_image=GATE_IMAGE),
    ),
    ("nothing, with `reject_unannotated`", "Pod", manifest(None), STRICT),
    (
        "nothing, and a bad default of its namespace",
        "Pod",
        manifest(None),
        around(annotations={DEFAULT_VRAM: "4GB"}),
    ),
    ("`headroom.gpu/vrm: 8Gi`", "Pod", annotated(vrm="8Gi"), NOTHING),
    ("`headroom/vram: 8Gi`", "Pod", manifest(annotations={"headroom/vram": "8Gi"}), NOTHING),
    ('`headroom.gpu/vram: "8"`', "Pod", annotated(vram="8"), NOTHING),
    ("`headroom.gpu/vram`, no GPU", "Pod", manifest("8Gi", container(gpus=0)), NOTHING),
    ("label `headroom.gpu/vram`", "Pod", labelled(), NOTHING),
    ("`headroom.gpu/placement: {}`", "Pod", annotated(vram="8Gi", placement="{}"), NOTHING),
    ("`schedulerName: x`", "Pod", manifest("8Gi", schedulerName="x"), NOTHING),
    ("nothing; it could go to gated node a", "Pod", manifest("8Gi"), around(node("a", "gated"))),
    ("nothing; to gated node a, and b without an agent", "Pod", manifest("8Gi"), MIXED),
    ("`headroom.gpu/share: limit`", "Pod", annotated(vram="25%", share="limit"), NOTHING),
    ("`headroom.gpu/vram: 25%`, with `mirror_vram`", "Pod", manifest("25%"), around(mirror=True)),
    ("nothing, with `count_vram` and no GPU node", "Pod", manifest(None), around(counts=True)),
    (
        "`headroom.gpu/vram: 500Gi`, more than any GPU has",
        "Pod",
        annotated(vram="500Gi"),
        around(node()),
    ),
    (
        "`headroom.gpu/vram-limit: 500Gi`, more than any GPU has",
        "Pod",
        annotated(vram="8Gi", vram_limit="500Gi"),
        around(node()),
    ),
    ("nothing, where GPUs are shared", "Pod", manifest(None), around(node())),
    (
        "env `NVIDIA_VISIBLE_DEVICES: all`",
        "Pod",
        manifest("8Gi", container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])),
        NOTHING,
    ),
    ("a bad template", "Deployment", owned(annotated(vram="8GB")), NOTHING),
    ("`headroom.gpu/vram` on itself", "Deployment", owned(manifest(None), vram="8Gi"), NOTHING),
    ("a template copied from a pod", "Job", owned(annotated(placement="{}")), NOTHING),
    (
        "`headroom.gpu/default-vram: 4GB`",
        "Namespace",
        {"metadata": {"annotations": {DEFAULT_VRAM: "4GB"}}},
        NOTHING,
    ),
    (
        "`headroom.gpu/max-vram-limit: none`",
        "Namespace",
        {"metadata": {"annotations": {MAX_VRAM_LIMIT: "none"}}},
        NOTHING,
    ),
    (
        "`headroom.gpu/vram: 4Gi`",
        "Namespace",
        {"metadata": {"annotations": {VRAM: "4Gi"}}},
        NOTHING,
    ),
    (
        "annotation `headroom.gpu/scheduler: none`",
        "Namespace",
        {"metadata": {"annotations": {SCHEDULER: "none"}}},
        NOTHING,
    ),
    (
        "`headroom.gpu/cordon: 0`",
        "Node",
        {"metadata": {"annotations": {"headroom.gpu/cordon": "0"}}},
        NOTHING,
    ),
    (
        "`headroom.gpu/device-choice: best`",
        "Node",
        {"metadata": {"annotations": {"headroom.gpu/device-choice": "best"}}},
        NOTHING,
    ),
    (
        "`headroom.gpu/reserve: -1Gi`",
        "Node",
        {"metadata": {"annotations": {"headroom.gpu/reserve": "-1Gi"}}},
        NOTHING,
    ),
]


def reported(kind: str, obj: dict[str, Any], where: AdmissionContext) -> Iterator[tuple[str, str]]:
    """Yield the changes and errors of the review, without the prefix that all messages share."""
    asked = read(json.dumps(review(obj, kind=kind)).encode())
    for decide in (answer_mutate, answer_validate):
        response = json.loads(decide(asked, lambda namespace: where))["response"]
        if not response["allowed"]:
            yield "rejected", response["status"]["message"].removeprefix("Headroom: ")
        for warning in response.get("warnings", ()):
            yield "warned", warning.removeprefix("Headroom: ")
        if not response["allowed"]:
            return


def sentences() -> str:
    lines = ["", "| of | what is written | | what its author reads |", "|---|---|---|---|"]
    for what, kind, obj, where in CASES:
        found = list(reported(kind, obj, where))
        assert found, what
        lines += [f"| {kind} | {what} | {how} | {printed} |" for how, printed in found]
    return "\n".join([*lines, "", ""])


def test_the_page_contains_the_exact_messages() -> None:
    _, _, rest = PAGE.read_text().partition(BEGIN)
    held, _, _ = rest.partition(END)
    assert held == sentences(), "python -m tests.admission.test_documented writes it again"


def test_the_page_lists_all_written_and_read_fields() -> None:
    text = PAGE.read_text()
    keys = (*EXTENDER_ANNOTATIONS, *(f"{key}<i>" for key in EXTENDER_ANNOTATION_PREFIXES))
    names = [key.removeprefix(PREFIX) for key in keys]
    names += [*USER_ANNOTATIONS, DEFAULT_VRAM, SCHEDULER, GATE]
    names += [mutation.BYTES_VARIABLE, mutation.FRACTION_VARIABLE, mutation.MPS_VARIABLE]
    names += [mutation.CAP_VARIABLES[0], "NVIDIA_GPU_MEMORY_REQUEST"]
    names += ["scheduler_name", "gate_image", "mirror_vram", "count_vram", "webhook_tls_cert"]
    assert [name for name in names if f"`{name}" not in text and f"{name}`" not in text] == []


def test_the_policy_protects_every_annotation_of_pods() -> None:
    manifests = yaml.safe_load_all((ROOT / "deploy/base/admission.yaml").read_text())
    (spec,) = (
        each["spec"]
        for each in manifests
        if each["kind"] == "ValidatingAdmissionPolicy"
        and each["metadata"]["name"] == "headroom-pod-annotations"
    )
    matches = {each["name"]: each["expression"] for each in spec["matchConditions"]}
    of = {each["name"]: each["expression"] for each in spec["variables"]}
    every = {*USER_ANNOTATIONS, *EXTENDER_ANNOTATIONS}
    for expression in (matches["can-concern-headroom"], of["changed"] + of["ofExtenders"]):
        assert {key for key in every if f'"{key}"' not in expression} == set()


def test_both_pages_show_the_same_gate() -> None:
    text = (ROOT / "docs/design/device-truth.md").read_text()
    _, _, rest = text.partition("```yaml\nspec:\n  initContainers:")
    (shown,) = yaml.safe_load(rest.partition("```")[0])
    made = gate_container(shown["image"])
    assert made.keys() == shown.keys()
    for key in ("name", "command", "securityContext"):
        assert made[key] == shown[key]
    assert made["resources"]["limits"] == shown["resources"]["limits"]
    assert [each["name"] for each in made["env"]] == [each["name"] for each in shown["env"]]


def test_the_manifests_match_the_resources_that_count_by_default() -> None:
    """The list is repeated in the manifests, because CEL cannot read the settings and the two files
    cannot share an expression.
    """
    names = (
        'name in ["nvidia.com/gpu", "nvidia.com/gpu.shared"] || name.startsWith("nvidia.com/mig-")'
    )
    assert Rules().resources == ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*")
    for file, times in (("webhook.yaml", 4), ("admission.yaml", 1)):
        text = " ".join((ROOT / "deploy/base" / file).read_text().split())
        assert text.count(names) == times == text.count("nvidia.com/mig-")


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + sentences() + END + rest.partition(END)[2])
