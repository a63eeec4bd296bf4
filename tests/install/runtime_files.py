"""Writes the configuration of a containerd that keeps all its files in one folder.

The configured runtime works like NVIDIA's container runtime: it edits the configuration of a
container and calls runc.
"""

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_RUNTIME = """#!{python} -IS
import glob, json, os, stat, sys
arguments = sys.argv[1:]
if "create" in arguments:
    path = arguments[arguments.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        config = json.load(file)
    environment = config["process"]["env"]
    sees_devices = any(each.startswith("NVIDIA_VISIBLE_DEVICES=") for each in environment)
{edit}
    with open(path, "w") as file:
        json.dump(config, file)
os.execvp("runc", ["runc", *arguments])
"""
_CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Without CAP_SYS_RESOURCE, no process may lower its score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{folder}/nvidia-container-runtime"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""


def write(folder: Path, pause: str, edit: str, network: Mapping[str, Any]) -> list[str]:
    """Write all files. Return the command that starts containerd.

    ``pause`` is the image of pod sandboxes. ``edit`` is Python code that changes ``config``, the
    OCI configuration of a container. The code can test ``sees_devices``. ``network`` is the CNI
    configuration of pods.
    """
    (folder / "containerd.toml").write_text(_CONTAINERD.format(folder=folder, pause=pause))
    (folder / "cni").mkdir()
    (folder / "cni/pods.conflist").write_text(json.dumps(network))
    runtime = folder / "nvidia-container-runtime"
    runtime.write_text(
        _RUNTIME.format(python=sys.executable, edit=textwrap.indent(edit.strip("\n"), " " * 4))
    )
    runtime.chmod(0o755)
    return ["containerd", f"--config={folder}/containerd.toml"]


def kubelet_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a kubelet that uses this containerd. Its pods are in the cgroup with
    the name of the folder.
    """
    return {
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "cgroupsPerQOS": True,
        "cgroupRoot": f"/{folder.name}",
        "enforceNodeAllocatable": ["none"],
    }
