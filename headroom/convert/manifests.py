"""Converts a file of manifests: finds the pod templates in its documents and converts each.

Pods for KAI, HAMi and gpushare, and pods with DRA claims, become pods for Headroom. In the other
direction, pods for Headroom become pods with DRA claims.

The result keeps comments, quotes and the order of keys. A file in which nothing is converted is
returned byte for byte.
"""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, DocumentStartEvent

from headroom.contract.annotations import VRAM
from headroom.convert.allocators import (
    GPU,
    QUEUES,
    is_foreign,
    object_of,
    unconverted,
    unread,
)
from headroom.convert.claim_template import KIND, ClaimTemplates
from headroom.convert.dra_claims import from_claims, to_claims
from headroom.convert.findings import Finding, Outcome
from headroom.convert.pod_template import Template, line_of

#: Maps each kind to the path of its pod template.
TEMPLATES = {
    "Pod": (),
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_RENDER_FIRST = "render a template first: helm template . | headroom convert -f -"
#: Maximum nesting of brackets in a manifest. Kubernetes' own objects need fewer than 20 levels.
MAX_NESTING = 200


class BadManifest(ValueError):
    """A file that cannot be converted. The message gives the reason and, if known, the line and the
    fix."""


@dataclass(frozen=True, slots=True)
class Options:
    #: Bytes of one unit of aliyun.com/gpu-mem: the --memory-unit of gpushare's plugin.
    memory_unit_bytes: int = 1 << 30
    #: schedulerName to set on converted pods. If None, only the scheduler of another allocator is
    #: removed.
    scheduler_name: str | None = None
    #: Whether to convert Headroom's pods to DRA claims instead of other pods to Headroom.
    to_dra: bool = False


@dataclass(frozen=True, slots=True)
class Converted:
    #: The converted file.
    text: str
    findings: tuple[Finding, ...]

    @property
    def understood(self) -> bool:
        """Return whether no part of the file was left for a person to convert."""
        return all(finding.outcome is not Outcome.NOT_UNDERSTOOD for finding in self.findings)

    @property
    def complete(self) -> bool:
        """Return whether the result has everything that the file requests."""
        return all(finding.outcome is Outcome.CHANGED for finding in self.findings)


def convert(text: str, options: Options) -> Converted:
    """Convert every pod template in a YAML or JSON file. Raises ``BadManifest``."""
    if _nested(text) > MAX_NESTING:
        raise BadManifest(f"is nested more than {MAX_NESTING} levels deep")
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
    claims = ClaimTemplates(documents)
    for index, document in enumerate(documents):
        if document is None:
            continue
        if not isinstance(document, dict):
            raise BadManifest(
                f"document {index + 1} is not a Kubernetes object. Example of its first line: "
                "'apiVersion: v1'"
            )
        if bad_line := _invalid_key_line(document):
            raise BadManifest(f"line {bad_line}: a key is not a string; {_RENDER_FIRST}")
        if index in aliased and any(True for _ in _keys(document, _is_concerned(options))):
            message = "not changed: it uses a YAML alias (*name); replace the alias with its value"
            findings.append(_not_understood(document, message, aliased[index]))
            continue
        before = len(findings)
        for template in _templates(document, _name(document), options):
            if isinstance(template, Finding):
                findings.append(template)
                continue
            changed |= _converted(template, document, claims, options)
            findings += template.findings
        if not options.to_dra and all(
            found.outcome is not Outcome.NOT_UNDERSTOOD for found in findings[before:]
        ):
            findings += _left_over(document)
    if not changed:
        return Converted(text, tuple(findings))
    for name, unused in claims.unused(documents):
        message = "removed, because no pod in the file uses it any more"
        findings.append(
            Finding(Outcome.CHANGED, line_of(unused, "kind"), f"{KIND} {name}", message)
        )
    out = io.StringIO()
    yaml.dump_all(claims.placed(documents), out)
    return Converted(out.getvalue(), tuple(findings))


def _converted(template: Template, document: Any, claims: ClaimTemplates, options: Options) -> bool:
    """Convert one pod template of a document in place. Return whether it was changed."""
    if options.to_dra:
        claim, findings = to_claims(template.pod, template.where, template.name, template.namespace)
        template.findings += findings
        if claim is not None:
            claims.add(claim, document)
            if options.scheduler_name is not None:
                template.pod["spec"]["schedulerName"] = options.scheduler_name
        return claim is not None
    changed = template.convert()
    used, findings = from_claims(template.pod, template.where, claims.of(template.namespace))
    template.findings += findings
    claims.release(template.namespace, used)
    return changed or bool(used)


def _is_concerned(options: Options) -> Callable[[object], bool]:
    """Return a function that checks whether a key, anywhere in a manifest, can be converted."""
    if options.to_dra:
        return lambda key: key in (GPU, VRAM)
    return lambda key: is_foreign(key) or key == "resourceClaims"


def _left_over(document: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each key of another allocator that is still in the document."""
    kinds = ", ".join(TEMPLATES)
    for key, line in _keys(document, is_foreign):
        message = f"{key}: not in a pod template of {kinds}; not changed"
        yield _not_understood(document, message, line)
    for key, line in _keys(document, unconverted):
        message = f"{unconverted(key)} is not converted, only KAI, HAMi and gpushare; not changed"
        yield _not_understood(document, f"{key}: {message}", line)
    for key, line in _keys(document, lambda key: not is_foreign(key) and unread(key)):
        why = "Headroom has no queues" if key in QUEUES else f"only {unread(key)} reads it"
        yield Finding(Outcome.LOST, line, _name(document), f"{key}: {why}; it was kept")
    if owner := object_of(document.get("apiVersion")):
        message = f"only {owner} reads objects of {document['apiVersion']}; it was kept"
        yield Finding(Outcome.LOST, None, _name(document), message)


def _not_understood(document: dict[str, Any], message: str, line: int | None) -> Finding:
    return Finding(Outcome.NOT_UNDERSTOOD, line, _name(document), message)


def _nested(text: str) -> int:
    """Return the maximum nesting of brackets. The parser's time is proportional to it."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _yaml(text: str) -> YAML:
    """Return a parser that writes YAML in the style of the file."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 16
    # Indent lists like the first list of the file.
    first = re.search(r"^( *)[^\s#-][^\n]*:[^\S\n]*\n( *)- ", text, re.MULTILINE)
    if first and len(first[2]) > len(first[1]):
        yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.explicit_start = text.lstrip().startswith("---")
    return yaml


def _aliased(text: str) -> dict[int, int]:
    """Map the index of each document with an alias to the line of its first alias."""
    found: dict[int, int] = {}
    index = -1
    for event in YAML().parse(text):
        if isinstance(event, DocumentStartEvent):
            index += 1
        elif isinstance(event, AliasEvent):
            found.setdefault(index, event.start_mark.line + 1)
    return found


def _templates(obj: Any, where: str, options: Options) -> Iterator[Template | Finding]:
    """Yield each pod template in the object, or a finding if it has an invalid form."""
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
    if wrong := _invalid_part(pod):
        yield Finding(Outcome.NOT_UNDERSTOOD, None, where, f"not changed: {wrong}")
        return
    name, namespace = _identity(obj.get("metadata"))
    yield Template(pod, where, options.memory_unit_bytes, options.scheduler_name, name, namespace)


def _identity(metadata: Any) -> tuple[str, str]:
    """Return name and namespace. With generateName, the name is the given prefix."""
    if not isinstance(metadata, dict):
        return "", ""
    name = metadata.get("name") or str(metadata.get("generateName") or "").rstrip("-")
    return str(name), str(metadata.get("namespace") or "")


def _invalid_part(pod: Any) -> str:
    """Return which part of a pod template is missing or has the wrong type, or "" if it is
    valid."""
    if not isinstance(pod, dict) or not isinstance(pod.get("spec"), dict):
        return "it has no pod template with a spec"
    metadata = pod.get("metadata") or {}
    if not isinstance(metadata, dict):
        return "metadata is not a mapping"
    for part in ("annotations", "labels"):
        if not isinstance(metadata.get(part) or {}, dict):
            return f"metadata.{part} is not a mapping"
    if not isinstance(pod["spec"].get("nodeSelector") or {}, dict):
        return "nodeSelector is not a mapping"
    if not _are_mappings(pod["spec"].get("resourceClaims") or []):
        return "resourceClaims is not a list of mappings"
    if not pod["spec"].get("containers"):
        return "it has no containers"
    for part in ("initContainers", "containers"):
        containers = pod["spec"].get(part) or []
        if not isinstance(containers, list):
            return f"{part} is not a list"
        for container in containers:
            if not isinstance(container, dict) or not isinstance(container.get("name"), str):
                return f"an item of {part} has no name"
            resources = container.get("resources") or {}
            mappings = [resources] + (
                [resources.get("limits"), resources.get("requests")]
                if isinstance(resources, dict)
                else []
            )
            if not all(isinstance(each or {}, dict) for each in mappings):
                return f"resources of container {container['name']} are not a mapping"
            if not _are_mappings((resources or {}).get("claims") or []):
                return f"claims of container {container['name']} are not a list of mappings"
            if not isinstance(container.get("env") or [], list):
                return f"env of container {container['name']} is not a list"
    return ""


def _are_mappings(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(each, dict) for each in part)


def _keys(node: Any, wanted: Callable[[object], object]) -> Iterator[tuple[str, int | None]]:
    """Yield every key in the tree for which ``wanted`` is true, with its line."""
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


def _invalid_key_line(node: Any, line: int = 1) -> int | None:
    """Return the line of the first mapping with a key that is not a string or number, or None.

    A template such as ``{{ .Values }}`` is valid YAML with such a key. ``line`` is the line of the
    enclosing mapping, for nodes that have no line themselves.
    """
    if isinstance(node, dict):
        line = node.lc.line + 1 if hasattr(node, "lc") else line
        if not all(isinstance(key, str | int | float) for key in node):
            return line
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return next((found for each in inner if (found := _invalid_key_line(each, line))), None)


def _name(obj: dict[str, Any]) -> str:
    metadata = obj.get("metadata")
    name = (
        metadata.get("name") or metadata.get("generateName") if isinstance(metadata, dict) else ""
    )
    return f"{obj.get('kind', 'object')} {name}".strip()
