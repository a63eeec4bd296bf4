"""A file of manifests: its documents, the pod templates in them, and the file written back.

Comments, quotes and the order of keys are kept, and a file in which nothing speaks to another
allocator comes out byte for byte.
"""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, DocumentStartEvent

from extender.convert.pod_template import Template, is_theirs, unconverted
from extender.convert.remarks import BadManifest, Finding, Weight

#: Kind -> where its pod template is.
TEMPLATES = {
    "Pod": (),
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}


_RENDER_FIRST = "a template is rendered first: helm template . | headroom convert -f -"


#: Of brackets in a manifest; those of Kubernetes' own objects are below twenty.
MOST_NESTED = 200


@dataclass(frozen=True, slots=True)
class Options:
    #: What one unit of aliyun.com/gpu-mem is: the --memory-unit of gpushare's plugin.
    memory_unit_bytes: int = 1 << 30
    #: Name of the scheduler that the pods are to ask for; None: the cluster's default.
    scheduler_name: str | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    text: str
    findings: tuple[Finding, ...]

    @property
    def understood(self) -> bool:
        return all(finding.weight is not Weight.NOT_UNDERSTOOD for finding in self.findings)


def convert(text: str, options: Options) -> Converted:
    """Convert every pod template in a YAML or JSON file; raises ``BadManifest``."""
    if _nested(text) > MOST_NESTED:
        raise BadManifest(f"is nested more than {MOST_NESTED} levels deep")
    yaml = _yaml(text)
    try:
        aliased = _aliased(text)
        documents = list(yaml.load_all(text))
    except MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise BadManifest(
            f"{line}is not YAML: {err.problem or err.context}; {_RENDER_FIRST}"
        ) from err
    except (YAMLError, RecursionError, ValueError) as err:
        raise BadManifest(f"is not YAML: {' '.join(str(err).split())}") from err
    findings: list[Finding] = []
    changed = False
    for index, document in enumerate(documents):
        if document is None:
            continue
        if not isinstance(document, dict):
            raise BadManifest(
                f"document {index + 1} is no Kubernetes object, which begins with, for example, "
                "'apiVersion: v1'"
            )
        if odd := _odd_key(document):
            raise BadManifest(f"line {odd}: a key is no word; {_RENDER_FIRST}")
        if index in aliased and any(True for _ in _keys(document, is_theirs)):
            message = "left as it was: it uses a YAML alias (*name); write out what it stands for"
            where = _name(document)
            findings.append(Finding(Weight.NOT_UNDERSTOOD, aliased[index], where, message))
            continue
        before = len(findings)
        for template in _templates(document, _name(document), options):
            if isinstance(template, Finding):
                findings.append(template)
                continue
            changed |= template.convert()
            findings += template.findings
        if any(found.weight is Weight.NOT_UNDERSTOOD for found in findings[before:]):
            continue
        findings += [
            Finding(
                Weight.NOT_UNDERSTOOD,
                line,
                _name(document),
                f"{key}: not in a pod template of {', '.join(TEMPLATES)}; left as it was",
            )
            for key, line in _keys(document, is_theirs)
        ] + [
            Finding(
                Weight.NOT_UNDERSTOOD,
                line,
                _name(document),
                f"{key}: {unconverted(key)} is not converted, only KAI, HAMi and gpushare; "
                "left as it was",
            )
            for key, line in _keys(document, unconverted)
        ]
    if not changed:
        return Converted(text, tuple(findings))
    out = io.StringIO()
    yaml.dump_all([document for document in documents if document is not None], out)
    return Converted(out.getvalue(), tuple(findings))


def _nested(text: str) -> int:
    """How many brackets are open at once, at most: each level takes the parser longer than the one
    before."""
    depth = most = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    return most


def _yaml(text: str) -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 16
    # Lists are written as the file's first one is.
    first = re.search(r"^( *)[^\s#-][^\n]*:[^\S\n]*\n( *)- ", text, re.MULTILINE)
    if first and len(first[2]) > len(first[1]):
        yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.explicit_start = text.lstrip().startswith("---")
    return yaml


def _aliased(text: str) -> dict[int, int]:
    """Document -> line of its first alias."""
    found: dict[int, int] = {}
    index = -1
    for event in YAML().parse(text):
        if isinstance(event, DocumentStartEvent):
            index += 1
        elif isinstance(event, AliasEvent):
            found.setdefault(index, event.start_mark.line + 1)
    return found


def _templates(obj: Any, where: str, options: Options) -> Iterator[Template | Finding]:
    if not isinstance(obj, dict):
        return
    kind = str(obj.get("kind", ""))
    if kind.endswith("List") and isinstance(obj.get("items"), list):
        for item in obj["items"]:
            yield from _templates(item, _name(item) if isinstance(item, dict) else where, options)
        return
    if kind not in TEMPLATES:
        return
    pod: Any = obj
    for key in TEMPLATES[kind]:
        pod = pod.get(key) if isinstance(pod, dict) else None
    if wrong := _misshapen(pod):
        yield Finding(Weight.NOT_UNDERSTOOD, None, where, f"left as it was: {wrong}")
        return
    yield Template(pod, where, options.memory_unit_bytes, options.scheduler_name)


def _misshapen(pod: Any) -> str:
    """Why it is no pod template; empty when it is one."""
    if not isinstance(pod, dict) or not isinstance(pod.get("spec"), dict):
        return "it has no pod template with a spec"
    metadata = pod.get("metadata") or {}
    if not isinstance(metadata, dict):
        return "metadata is no mapping"
    for part in ("annotations", "labels"):
        if not isinstance(metadata.get(part) or {}, dict):
            return f"metadata.{part} is no mapping"
    if not pod["spec"].get("containers"):
        return "it has no containers"
    for part in ("initContainers", "containers"):
        containers = pod["spec"].get(part) or []
        if not isinstance(containers, list):
            return f"{part} is no list"
        for container in containers:
            if not isinstance(container, dict) or not isinstance(container.get("name"), str):
                return f"one of {part} has no name"
            resources = container.get("resources") or {}
            halves = [resources] + (
                [resources.get("limits"), resources.get("requests")]
                if isinstance(resources, dict)
                else []
            )
            if not all(isinstance(half or {}, dict) for half in halves):
                return f"resources of container {container['name']} are no mapping"
            if not isinstance(container.get("env") or [], list):
                return f"env of container {container['name']} is no list"
    return ""


def _keys(node: Any, wanted: Callable[[object], object]) -> Iterator[tuple[str, int | None]]:
    """Those that are wanted, wherever they are, each with its line."""
    if isinstance(node, dict):
        for key, value in node.items():
            if wanted(key):
                try:
                    yield str(key), node.lc.key(key)[0] + 1  # type: ignore[attr-defined]
                except (AttributeError, KeyError, TypeError):
                    yield str(key), None
            yield from _keys(value, wanted)
    elif isinstance(node, list):
        for value in node:
            yield from _keys(value, wanted)


def _odd_key(node: Any, line: int = 1) -> int | None:
    """Line of the mapping around the first key that no manifest can have, as in ``{{ .Values }}``,
    which is YAML by accident; None where all are in order."""
    if isinstance(node, dict):
        line = node.lc.line + 1 if hasattr(node, "lc") else line
        if not all(isinstance(key, str | int | float) for key in node):
            return line
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return next((found for each in inner if (found := _odd_key(each, line))), None)


def _name(obj: dict[str, Any]) -> str:
    metadata = obj.get("metadata")
    name = (
        metadata.get("name") or metadata.get("generateName") if isinstance(metadata, dict) else ""
    )
    return f"{obj.get('kind', 'object')} {name}".strip()
