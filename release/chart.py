"""Packages the chart in deploy/, with its version, its addresses and a README."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from release.archives import normalise
from release.source import ReleaseError, Source
from release.tools import tool

CHART = "deploy/chart/headroom"


def build_chart(source: Source, registry: str, out: Path) -> Path:
    """Write the package into ``out``, and return its path.

    If ``registry`` is empty, Chart.yaml lists no images.
    """
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder, "headroom")
        shutil.copytree(source.folder / CHART, chart)  # with the files behind its links
        metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
        complete(metadata, source, registry)
        (chart / "Chart.yaml").write_text(yaml.safe_dump(metadata, sort_keys=False, width=100))
        (chart / "README.md").write_text(readme(chart, source))
        _helm("lint", "--strict", "--quiet", chart)
        version = ("--version", source.version, "--app-version", source.version)
        _helm("package", chart, *version, "--destination", out)
    path = out / f"headroom-{source.version}.tgz"
    normalise(path, source.epoch_s)
    return path


def complete(metadata: dict[str, Any], source: Source, registry: str) -> None:
    """Add what depends on the release to Chart.yaml, mostly annotations of Artifact Hub."""
    files = f"{source.repository}/blob/v{source.version}"
    metadata |= {
        "home": source.repository,
        "sources": [source.repository],
        "icon": f"{source.repository}/raw/v{source.version}/{CHART}/icon.svg",
    }
    links = {
        "Documentation": f"{files}/README.md",
        "Release notes": f"{source.repository}/releases/tag/v{source.version}",
    }
    added = {"links": [{"name": name, "url": url} for name, url in links.items()]}
    if registry:
        added["images"] = [
            {"name": name, "image": f"{registry}/{name}:{source.version}"}
            for name in ("headroom-extender", "headroom-agent")
        ]
    metadata["annotations"] |= {
        f"artifacthub.io/{name}": yaml.safe_dump(value, sort_keys=False, width=200)
        for name, value in added.items()
    }


def readme(chart: Path, source: Source) -> str:
    """Return the chart's README: how to install it, and all of its values."""
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    lines = [
        "# Headroom",
        "",
        metadata["description"],
        "",
        "```sh",
        f"tar xzf headroom-{source.version}.tgz",
        "helm install headroom ./headroom -n headroom-system --create-namespace \\",
        "  -f headroom/platforms/gpu-operator.yaml \\",
        "  --set images.extender.repository=REGISTRY/headroom-extender \\",
        "  --set images.agent.repository=REGISTRY/headroom-agent",
        "```",
        "",
        "`platforms/` has the values for each platform. "
        f"[The guide]({source.repository}/blob/v{source.version}/docs/get-started/helm.md) "
        "shows which to use.",
        "",
        values_table(schema, values),
        "",
    ]
    return "\n".join(lines)


def values_table(schema: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return a Markdown table of all values, without a newline at its end.

    ``schema`` is the content of values.schema.json, and ``values`` the content of values.yaml.
    """
    lines = ["| value | default | description |", "|---|---|---|"]
    for path, default, description in rows(schema, values, schema):
        shown = json.dumps(default) if default is not None else ""
        lines.append(f"| `{path}` | {f'`{shown}`' if shown else ''} | {description} |")
    return "\n".join(lines)


def rows(
    schema: Mapping[str, Any], values: Any, whole: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Yield path, default and description of each value, in the order of the schema.

    ``schema`` is a part of ``whole``, which has the definitions. The default of a value that
    values.yaml does not set is None.
    """
    schema = _resolved(schema, whole)
    for name, below in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        default = values.get(name) if isinstance(values, dict) else None
        resolved = _resolved(below, whole)
        # docs/reference/settings.md describes the settings.
        if resolved.get("properties") and here != "settings":
            yield from rows(resolved, default, whole, here)
        else:
            described = (each.get("description") for each in (below, resolved, schema))
            text = str(next(filter(None, described), ""))
            yield here, default, " ".join(text.split()).replace("|", "\\|")


def _resolved(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a reference to a definition of the same schema."""
    if reference := schema.get("$ref"):
        found: Mapping[str, Any] = whole["definitions"][reference.rpartition("/")[2]]
        return found
    return schema


def _helm(*arguments: str | Path) -> None:
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(part) for part in (tool("helm"), *arguments)],
            env={"PATH": os.environ["PATH"], "HOME": home, "KUBECONFIG": os.devnull},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise ReleaseError(f"helm {arguments[0]} failed: {done.stdout}{done.stderr}")
