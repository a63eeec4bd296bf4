"""Pins the versions of Kubernetes that the tests build and run.

    python -m tests.gobin.kubernetes [MINOR ...]    pin these minors again, by default all

To add a version, add it to ``VERSIONS`` and run this command, which writes the folder
``kubernetes-MINOR``. The folder's ``go.mod`` has a ``tool`` line for each component and the
requirements of Kubernetes itself. ``build.py`` builds binaries such as ``kubelet-1.36`` from it. A
name without a version, such as ``kubelet``, stands for the newest version that is not a
pre-release.
"""

import argparse
import json
import os
import re
import subprocess
from pathlib import Path

from tests.gobin import build

#: The tested version of each minor, newest first.
VERSIONS = (
    "1.38.0-beta.0",
    "1.37.2",
    "1.36.3",
    "1.35.4",
    "1.34.4",
    "1.33.13",
    "1.32.13",
    "1.31.4",
)
COMPONENTS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
#: For each Kubernetes version, the modules whose required version the Go module proxy does not
#: serve, with the nearest version that the proxy serves.
SUBSTITUTES = {
    "1.38.0-beta.0": {"sigs.k8s.io/structured-merge-diff/v7": "v7.0.0"},
    "1.32.13": {"k8s.io/endpointslice": "v0.32.12"},
}
_NOT_SERVED = "the Go module proxy does not serve {} (403)"
#: For each Kubernetes version, the components that cannot be built, with the reason.
NOT_BUILT = {
    "1.38.0-beta.0": {
        "kube-apiserver": _NOT_SERVED.format("k8s.io/apiextensions-api v0.38.0-beta.0"),
        "kube-controller-manager": _NOT_SERVED.format("k8s.io/apiextensions-api v0.38.0-beta.0"),
        "kube-proxy": _NOT_SERVED.format("sigs.k8s.io/iptables-wrappers v1.0.0"),
        "kubelet": _NOT_SERVED.format("sigs.k8s.io/iptables-wrappers v1.0.0"),
    }
}


def main() -> None:
    minors = [minor_of(version) for version in VERSIONS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("minors", nargs="*", metavar="MINOR", help=", ".join(minors))
    args = parser.parse_args()
    if unknown := set(args.minors) - set(minors):
        parser.error(f"no such minor: {', '.join(sorted(unknown))}; there are {', '.join(minors)}")
    for version in VERSIONS:
        if not args.minors or minor_of(version) in args.minors:
            build.say(f"pinning Kubernetes {version}")
            pin(version, build.MODULES / f"kubernetes-{minor_of(version)}")


def minor_of(version: str) -> str:
    """Return the minor of a version, for example ``1.37`` for ``1.37.2``."""
    return ".".join(version.split(".")[:2])


def built_components(version: str) -> list[str]:
    """Return the components of a version that can be built."""
    return [name for name in COMPONENTS if name not in NOT_BUILT.get(version, {})]


def pin(version: str, folder: Path) -> None:
    """Write ``go.mod`` and ``go.sum`` of one version. This needs access to the Go module proxy."""
    folder.mkdir(exist_ok=True)
    go = build.find_go(build.default_cache(), build.version_tuple(build.GO_VERSION))
    environment = os.environ | {"GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    module = f"k8s.io/kubernetes@v{version}"
    download = [go, "mod", "download", "-json", module]
    answer = subprocess.run(
        download, cwd=folder.parent, env=environment, check=True, capture_output=True
    )
    upstream = Path(json.loads(answer.stdout)["GoMod"]).read_text()
    (folder / "go.mod").write_text(go_mod(version, upstream))
    # -e ignores modules that the proxy does not serve, because only tests of Kubernetes require
    # them.
    subprocess.run([go, "mod", "tidy", "-e"], cwd=folder, env=environment, check=True)
    packages = [f"k8s.io/kubernetes/cmd/{name}" for name in built_components(version)]
    complete = [go, "list", "-mod=readonly", "-deps", *packages]
    subprocess.run(complete, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def go_mod(version: str, upstream: str) -> str:
    """Return the ``go.mod`` that builds a version, given the ``go.mod`` of Kubernetes itself.

    Kubernetes replaces its staging repositories with local folders. Use the published modules with
    version 0.MINOR.PATCH instead.
    """
    go = re.search(r"^go \S+$", upstream, re.MULTILINE)
    assert go is not None, f"go.mod of Kubernetes {version} names no version of Go"
    staging = re.findall(r"^\s+(\S+) => \./staging/", upstream, re.MULTILINE)
    replaced = dict.fromkeys(staging, f"v0.{version.removeprefix('1.')}")
    replaced |= SUBSTITUTES.get(version, {})
    return "\n".join(
        [
            f"module headroom.gpu/tests/gobin/kubernetes-{minor_of(version)}",
            go[0],
            *(f"tool k8s.io/kubernetes/cmd/{name}" for name in built_components(version)),
            f"require k8s.io/kubernetes v{version}",
            *(f"replace {name} => {name} {pinned}" for name, pinned in replaced.items()),
        ]
    )


if __name__ == "__main__":
    main()
