"""Writes the manifest with which krew installs ``kubectl headroom``."""

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from release.client import PYTHONS
from release.source import ReleaseError, Source
from release.tools import tool

DESCRIPTION = """\
Headroom makes Kubernetes aware of GPU memory. This plugin shows why a pod waits for a GPU or why it
is on its node, which pods hold GPU memory, how many more pods fit, and what would help.
It needs Headroom's console in the cluster, and only reads.
"""
CAVEATS = f"""\
Needs python3 on the PATH, in version {PYTHONS[0]} to {PYTHONS[-1]}, and glibc on Linux. The first
call unpacks the plugin into ~/.shiv. `kubectl headroom doctor` needs more packages than the plugin
has; pip install 'headroom-gpu[extender]' provides them.
"""


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as block scalars."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def write_manifest(source: Source, archives: Mapping[tuple[str, str], Path], path: Path) -> None:
    """Write the manifest of these archives, by platform, and validate it with krew's own tool.

    krew takes the plugin's name from the name of the file, headroom.yaml.
    """
    downloads = f"{source.repository}/releases/download/v{source.version}"
    manifest: dict[str, Any] = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "headroom"},
        "spec": {
            "version": f"v{source.version}",
            "homepage": source.repository,
            "shortDescription": "Show why GPU pods wait and which pods hold GPU memory",
            "description": DESCRIPTION,
            "caveats": CAVEATS,
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": system, "arch": machine}},
                    "uri": f"{downloads}/{archive.name}",
                    "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
                    "bin": "kubectl-headroom",
                    "files": [
                        {"from": name, "to": "."} for name in ("kubectl-headroom", "LICENSE")
                    ],
                }
                for (system, machine), archive in archives.items()
            ],
        },
    }
    text = yaml.dump(manifest, Dumper=_Readable, sort_keys=False, width=200)
    path.write_text(text, encoding="utf-8")
    validate(path)


def validate(path: Path) -> None:
    """Raise ``ReleaseError`` if krew would not accept the manifest. This downloads nothing."""
    command = [str(tool("validate-krew-manifest")), "-manifest", str(path), "-skip-install"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if checked.returncode:
        raise ReleaseError(f"krew rejects {path}: {checked.stdout}{checked.stderr}")
