"""The page of all annotations, labels and other names that Headroom defines in Kubernetes."""

from collections.abc import Iterable

from headroom.contract.annotations import EXTENDER_ANNOTATION_PREFIXES
from headroom.contract.keys import KEYS, YOU, Key
from reference.markdown import code, head, table

_INTRO = """\
Set the annotations of the first three sections. Headroom writes all others.

- Annotations of a pod take effect when the pod is created, so put them in the pod template. They
  cannot be changed after the pod is bound.
- Annotations of namespaces and nodes take effect at once, for pods that are created or placed
  later.
- Amounts are Kubernetes quantities of bytes: `8Gi`, `8000Mi`, `512Mi`. They count on each GPU.
- The webhook rejects or warns about invalid values, and about names that do not exist
  ([admission.md](../design/admission.md#errors-and-warnings)).

"""


def page() -> str:
    """Return docs/reference/annotations.md."""
    yours = [key for key in KEYS if key.writer.startswith(YOU)]
    sections = {
        "On pods": [key for key in yours if key.on.startswith("Pod")],
        "On namespaces": [key for key in yours if "Namespace" in key.on],
        "On nodes": [key for key in yours if key.on == "Node"],
    }
    columns = "name | values | example | default | read by | description"
    shown = "".join(
        f"## {name}\n\n{table(columns, _yours(keys))}" for name, keys in sections.items()
    )
    written = [key for key in KEYS if key not in yours]
    return (
        head("Annotations and labels", "headroom/contract/keys.py")
        + _INTRO
        + shown
        + "## Written by Headroom\n\n"
        + table("name | kind | on | written by | read by | values | description", _ours(written))
    ).rstrip("\n") + "\n"


def _yours(keys: Iterable[Key]) -> Iterable[tuple[str, ...]]:
    for key in keys:
        name = code(key.name) + (" (label)" if key.kind == "label" else "")
        written = f" Written by {key.writer}." if key.writer != YOU else ""
        yield (
            name,
            key.values,
            code(key.example),
            key.default,
            key.reader,
            key.meaning + written,
        )


def _ours(keys: Iterable[Key]) -> Iterable[tuple[str, ...]]:
    for key in keys:
        index = "INDEX" if key.name in EXTENDER_ANNOTATION_PREFIXES else ""
        values = key.values if key.values == "-" else f"{key.values}; example: {code(key.example)}"
        yield (
            code(key.name + index),
            key.kind,
            key.on,
            key.writer,
            key.reader,
            values,
            key.meaning,
        )
