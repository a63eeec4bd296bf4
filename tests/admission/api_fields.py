"""Records the Kubernetes API fields that the admission policies depend on, for each minor version.

    python -m tests.admission.api_fields

Reads the sources in the cache of Go modules, which ``tests/gobin/build.py`` fills: k8s.io/api,
k8s.io/apimachinery and k8s.io/kubernetes of each version in ``tests/gobin/kubernetes.py``. Run this
program after you add a version there.
"""

import json
import re
import subprocess
from pathlib import Path

from tests.gobin import build
from tests.gobin.kubernetes import VERSIONS, minor_of

FILE = Path(__file__).with_name("api_fields.json")
#: The Go module and the file that define each type.
TYPES = {
    "PodStatus": ("k8s.io/api", "core/v1/types.go"),
    "NodeStatus": ("k8s.io/api", "core/v1/types.go"),
    "Binding": ("k8s.io/api", "core/v1/types.go"),
    "Container": ("k8s.io/api", "core/v1/types.go"),
    "ObjectMeta": ("k8s.io/apimachinery", "pkg/apis/meta/v1/types.go"),
}
#: The file in which the API server lists its resources and subresources.
_STORAGE = "pkg/registry/core/rest/storage_core.go"


def main() -> None:
    found = {minor_of(version): of_version(version, module_cache()) for version in VERSIONS}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def module_cache() -> Path:
    go = build.find_go(build.default_cache(), build.version_tuple(build.GO_VERSION))
    answer = subprocess.run([go, "env", "GOMODCACHE"], capture_output=True, text=True, check=True)
    return Path(answer.stdout.strip())


def of_version(version: str, cache: Path) -> dict[str, list[str]]:
    """Return the JSON field names of each type. The key "pods" has the resources that write
    pods.
    """
    fields = {
        name: json_names((cache / f"{module}@v0.{version.removeprefix('1.')}" / file), name)
        for name, (module, file) in TYPES.items()
    }
    storage = (cache / f"k8s.io/kubernetes@v{version}" / _STORAGE).read_text()
    return fields | {"pods": resources(storage)}


def json_names(file: Path, of: str) -> list[str]:
    body = re.search(rf"^type {of} struct {{\n(.*?)^}}", file.read_text(), re.M | re.S)
    assert body is not None, f"{file} defines no type {of}"
    return re.findall(r'^\t(?!//).*`json:"(\w+)', body[1], re.M)


def resources(storage: str) -> list[str]:
    """Return the names of the pod resources that the API server serves."""
    start = storage.index('resource := "pods"')
    block = storage[start : storage.index('resource := "', start + 1)]
    suffixes = re.findall(r'storage\[resource(?:\s*\+\s*"(/\w+)")?\]', block)
    others = re.findall(r'resource := "(bindings)"', storage)
    return sorted({*(f"pods{suffix}" for suffix in suffixes), *others})


if __name__ == "__main__":
    main()
