"""``kubectl headroom score``: ranks all nodes for a pod, or explains one node."""

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from headroom.contract.annotations import USER_ANNOTATIONS, VRAM
from headroom.contract.unread_annotations import without_effect
from headroom.kubectl import tables
from headroom.kubectl.debug_api_client import BAD_INPUT, NOT_THERE, CommandError
from headroom.kubectl.options import Limit, Namespace, Options
from headroom.kubectl.output import note_more, print_data, show, show_lines, show_table
from headroom.kubectl.top import counted
from headroom.kubectl.why import score as scored
from headroom.kubectl.workload import pod_key

#: Maximum size of a manifest in bytes; the debug API accepts no larger body.
_MAX_BYTES = 1 << 20


class ScoreOutput(Enum):
    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"
    NAME = "name"


def score(
    context: typer.Context,
    pod: Annotated[
        str | None,
        typer.Argument(help="Name of the pod, namespace/name, or a workload: deploy/NAME."),
    ] = None,
    filename: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--filename",
            help="A manifest of a pod that does not exist yet, or of a workload with a pod"
            " template; - reads standard input.",
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Every check and term of this node; default: all nodes.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Compare --node with this node; default: with the best other."),
    ] = None,
    decision: Annotated[
        str | None,
        typer.Option(
            help="The recorded ranking of a past decision: last, or an id from decisions -o wide."
        ),
    ] = None,
    namespace: Namespace = None,
    limit: Limit = None,
    output: Annotated[
        ScoreOutput | None,
        typer.Option(
            "-o",
            "--output",
            help="json, yaml: the whole answer. wide: more columns. name: the nodes on which the"
            " pod fits, best first.",
        ),
    ] = None,
) -> None:
    """Rank all nodes for a pod with their scores, or explain one node with every check and term.

    The pod can also be one that does not exist yet (-f), or the pod of a past decision
    (--decision).
    """
    options: Options = context.obj
    if (pod is None) == (filename is None):
        raise CommandError("name either a pod or a manifest. Example: score -f pod.yaml", BAD_INPUT)
    if node is not None and output is ScoreOutput.NAME:
        raise CommandError("-o name lists nodes, so remove --node. Example: -o json", BAD_INPUT)
    query = {"node": node, "against": against, "limit": limit}
    if filename is None:
        api = options.api()
        key = pod_key(options, api, pod or "", namespace)
        body = api.get("score", pod=key, decision=decision, **query)
    elif decision is not None:
        raise CommandError("--decision needs a pod that was decided; remove -f", BAD_INPUT)
    else:
        manifest, *others = new_pods(_text(filename), filename, options.namespace(namespace))
        for note in _notes(manifest, len(others), filename):
            show(note, error=True)
        body = options.api().post("score", body={"manifest": manifest}, **query)
    if print_data(body, output):
        return
    if node is not None:
        show_lines(scored(body))
    elif output is ScoreOutput.NAME:
        _show_names(body)
    else:
        table = tables.ranking(body, wide=output is ScoreOutput.WIDE)
        show_table(body, table, None, "the cluster has no nodes")
        show_lines(tables.ranking_notes(body))
        note_more(body)


def _show_names(body: Mapping[str, Any]) -> None:
    """Print the nodes that fit, as kubectl -o name does. Exit with status 1 if there are none."""
    names = [each["node"] for each in body["nodes"] if each["fits"]]
    for name in names:
        show(f"node/{name}")
    if len(names) < body["fits"]:
        note_more(body)
    if not names:
        show("the pod fits on no node", error=True)
        raise typer.Exit(NOT_THERE)


def _text(filename: str) -> bytes:
    try:
        if filename == "-":
            text = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with Path(filename).open("rb") as file:
                text = file.read(_MAX_BYTES + 1)
    except OSError as err:
        raise CommandError(f"--filename: {filename}: {err.strerror or err}", BAD_INPUT) from err
    if len(text) > _MAX_BYTES:
        raise CommandError(f"--filename: {filename} is larger than 1 MiB", BAD_INPUT)
    return text


def _notes(manifest: Mapping[str, Any], others: int, filename: str) -> Iterator[str]:
    """Yield what the author of a manifest may not expect of the answer."""
    metadata = manifest["metadata"]
    if others:
        name = metadata.get("name") or "without a name"
        yield (
            f"--filename: {filename} has {counted(1 + others, 'pod')}; this is the score of the "
            f"first, {name}"
        )
    written = metadata.get("annotations")
    annotations = written if isinstance(written, dict) else {}
    names = {str(name): str(text) for name, text in annotations.items()}
    yield from (f"--filename: {each}" for each in without_effect(names, USER_ANNOTATIONS))
    if VRAM not in names:
        yield (
            f"--filename: annotation {VRAM} is missing, so the default of the namespace or the "
            f"share of one replica counts. Example: {VRAM}: 8Gi"
        )


def new_pods(text: bytes, filename: str, namespace: str | None) -> list[dict[str, Any]]:
    """Return the pods and pod templates of a manifest. Raises ``CommandError`` if it has none.

    ``namespace`` is used if the manifest names none.
    """
    import yaml  # slow to import

    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as err:
        line = str(getattr(err, "problem_mark", "") or type(err).__name__).strip()
        raise CommandError(f"--filename: {filename} is not valid YAML: {line}", BAD_INPUT) from err
    pods: list[dict[str, Any]] = []
    for found in _objects(documents):
        metadata = found.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        where = {"namespace": metadata.get("namespace") or namespace}
        if found.get("kind") == "Pod":
            pods.append({**found, "metadata": {**metadata, **where}})
        elif (template := _template(found)) is not None:
            labels = template.get("metadata")
            labels = labels if isinstance(labels, dict) else {}
            name = {"name": metadata.get("name")} if metadata.get("name") else {}
            metadata = {**labels, **name, **where}
            pods.append({"spec": template.get("spec"), "metadata": metadata})
    if pods:
        return pods
    raise CommandError(
        f"--filename: {filename} has no pod and no pod template. Example: kind: Pod", BAD_INPUT
    )


def _objects(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a manifest, including those in lists."""
    for each in documents:
        if isinstance(each, dict):
            items = each.get("items")
            yield from _objects(items) if isinstance(items, list) else [each]


def _template(found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the pod template of a workload, such as a Deployment or a CronJob, or None."""
    spec = found.get("spec")
    for key in ("jobTemplate", "spec", "template"):
        inner = spec.get(key) if isinstance(spec, dict) else None
        spec = inner if isinstance(inner, dict) else spec
        if key == "template":
            return inner if isinstance(inner, dict) else None
    return None
