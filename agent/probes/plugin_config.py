"""Reads the configuration of the device plugin, container toolkit and kubelet through /proc.

Process names and install paths differ between distributions. So the plugin and the kubelet are
found as the processes that listen on their sockets in the kubelet's directory.

The plugin prefers its flags over its environment, and its environment over its file. Root with
CAP_SYS_PTRACE can read all three through /proc. The plugin's config-manager replaces the file and
signals the plugin without restarting it, so a file is read again whenever it has changed. All reads
share one deadline, because a file, and even a command line, can be on a file system that does not
answer.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from agent.deadline import Hanging, Worker
from agent.probes.cause import Cause
from agent.probes.files_inside import Unreadable, files_below, read_inside
from agent.probes.host_processes import (
    ConfigFiles,
    SocketListeners,
    environment_of,
    flags_of,
    listener,
    parse_flags,
    read_text,
)
from agent.probes.readings import (
    TOPOLOGY_POLICIES,
    PluginReading,
    Reading,
    SourceReading,
    TopologyReading,
)
from headroom.contract.gpunode import MAX_REPLICAS, Sharing

PLUGIN = "plugin"
KUBELET = "kubelet"

#: The sockets of NVIDIA's plugin, one for each resource.
_PLUGIN_SOCKETS = "nvidia-*.sock"
#: The kubelet's own socket, which is in the same folder.
_KUBELET_SOCKET = "kubelet.sock"
#: Sockets of GKE's own device plugin (container-engine-accelerators), which has different flags.
_GKE_SOCKETS = "nvidiaGPU-*.sock"
#: Maximum number of seconds for all reads of one cycle together.
READ_S = 2.0
#: k3s runs the kubelet inside the k3s process and hides the kubelet's arguments. It adds the files
#: of a directory below its data directory to the configuration. The data directory is found through
#: an environment variable, which contains a path below its subdirectory ``data``.
_K3S = ("k3s", "k3s-server", "k3s-agent")
_K3S_DATA, _K3S_FILES = "/var/lib/rancher/k3s", "agent/etc/kubelet.conf.d"
#: Maximum size of MicroK8s' file with the kubelet's flags.
_MOST_ARGUMENT_BYTES = 1 << 16
#: Matches a variable in this file.
_VARIABLE = re.compile(r"\$\{?([A-Za-z0-9_]+)\}?")
#: Configuration files of the toolkit, as the GPU Operator and the packages install them.
_TOOLKIT = (
    "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
    "/etc/nvidia-container-runtime/config.toml",
)


class ConfigurationProbe:
    """Reads the configuration of device plugin and kubelet.

    ``root`` is the host's /proc. ``sockets`` is the kubelet's device plugin directory.
    ``listening`` returns the pid behind a socket, like ``listener``.
    """

    def __init__(
        self,
        root: Path,
        sockets: Path,
        listening: Callable[[Path], int] = listener,
        read_s: float = READ_S,
    ) -> None:
        self._root = root
        self._listeners = SocketListeners(root, sockets, listening)
        self._files = ConfigFiles()
        self._read_s = read_s
        self._worker: Worker[list[Reading]] = Worker("configuration")

    def read(self) -> Iterable[Reading]:
        try:
            return self._worker.run(self._read, self._read_s)
        except Hanging:
            why = "reading its configuration takes too long"
            return [SourceReading(source, "degraded", why) for source in (PLUGIN, KUBELET)]

    def _read(self) -> list[Reading]:
        self._listeners.update((_PLUGIN_SOCKETS, _GKE_SOCKETS, _KUBELET_SOCKET))
        return [*self._plugin(), *self._kubelet()]

    def _plugin(self) -> Iterable[Reading]:
        process, source = self._listeners.only("device plugin", _PLUGIN_SOCKETS, PLUGIN)
        if (
            process is None
            and self._listeners.only("device plugin", _GKE_SOCKETS, PLUGIN)[0] is not None
        ):
            why = "it is GKE's own plugin; the labels of the node show how it shares"
            return [SourceReading(PLUGIN, "absent", Cause(why, "gke_plugin"))]
        if process is None:
            return [source]
        flags, environment = flags_of(process), environment_of(process)
        if environment is None:
            why = "environment of the device plugin cannot be read: CAP_SYS_PTRACE is missing"
            return [SourceReading(PLUGIN, "degraded", Cause(why, "no_ptrace"))]
        path = flags.get("config-file") or environment.get("CONFIG_FILE")
        try:
            file = self._files.read(process, path) if path else {}
            reading = _plugin_reading(flags, environment, file)
        except (OSError, ValueError, TypeError) as err:  # the file may contain any YAML
            why = f"configuration of the device plugin cannot be read ({_cause(err)})"
            return [SourceReading(PLUGIN, "degraded", why)]
        return [replace(reading, toolkit_ignores_environment=self._toolkit()), source]

    def _toolkit(self) -> bool:
        """Return ``ignores_environment`` of the first toolkit file that can be read."""
        for path in _TOOLKIT:
            try:
                return ignores_environment(self._files.read(self._root / "1", path))
            except (OSError, ValueError):
                continue
        return False

    def _kubelet(self) -> Iterable[Reading]:
        process, source = self._listeners.only("kubelet", _KUBELET_SOCKET, KUBELET)
        if process is None:
            return [source]
        try:
            policy = self._topology_policy(process)
        except (OSError, ValueError, TypeError) as err:
            why = f"configuration of the kubelet cannot be read ({_cause(err)})"
            return [SourceReading(KUBELET, "degraded", why)]
        if policy is None:
            why = "k3s hides the kubelet's flags, and its files set no topology manager policy"
            return [SourceReading(KUBELET, "absent", Cause(why, "k3s"))]
        return [TopologyReading(KUBELET, policy), source]

    def _topology_policy(self, process: Path) -> str | None:
        """Return the kubelet's topology manager policy, or None if flags that k3s hides may set it.

        Raises ``OSError`` and ``ValueError`` if a file cannot be read.
        """
        flags = _kubelet_flags(process)
        hidden = (read_text(process / "comm") or "").strip() in _K3S
        if hidden:
            below = (environment_of(process) or {}).get("K3S_DATA_DIR", "")
            data = below.rpartition("/data/")[0] or _K3S_DATA
            flags = {"config-dir": f"{data}/{_K3S_FILES}"}
        policy = flags.get("topology-manager-policy", "")
        files = [flags["config"]] if "config" in flags else []
        if "config-dir" in flags:
            # Drop-in files override the configuration file, in the order of their names.
            found = files_below(process, flags["config-dir"])
            files += [path for path in found if path.endswith(".conf")]
        for path in reversed(files):
            if policy:
                break
            config = _mapping(self._files.read(process, path))
            if "topologyManagerPolicy" in config:
                policy = config["topologyManagerPolicy"] or "none"  # null is the default
        if hidden and not policy:
            return None
        policy = policy or "none"
        if policy not in TOPOLOGY_POLICIES:
            raise ValueError("not a topology manager policy")
        return policy


def _kubelet_flags(process: Path) -> dict[str, str]:
    """Return the kubelet's flags.

    MicroK8s runs the kubelet in a process with other components, and keeps its flags in a file,
    without quotes and with environment variables. Raises ``Unreadable``.
    """
    flags = flags_of(process)
    if (path := flags.get("kubelet-args-file")) is None:
        return flags
    _, content = read_inside(process, path, _MOST_ARGUMENT_BYTES)
    lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
    text = re.sub("[\"']", "", " ".join(line for line in lines if not line.startswith("#")))
    variables = environment_of(process) or {}
    return parse_flags(_VARIABLE.sub(lambda found: variables.get(found[1], ""), text).split())


def _cause(err: Exception) -> str:
    """Return why a file cannot be read. The text does not contain the content of the file."""
    return str(err) if isinstance(err, Unreadable) else type(err).__name__


def ignores_environment(toolkit: Mapping[str, Any]) -> bool:
    """Return whether the toolkit ignores NVIDIA_VISIBLE_DEVICES of unprivileged pods.

    ``toolkit`` is the content of its config.toml. By default, the toolkit reads the variable.
    """
    return toolkit.get("accept-nvidia-visible-devices-envvar-when-unprivileged", True) is not True


def _plugin_reading(
    flags: Mapping[str, str], environment: Mapping[str, str], file: Any
) -> PluginReading:
    """Combine flags, environment and file. Raises ``ValueError`` if the file is invalid."""
    config = _mapping(file)
    own = _mapping(_mapping(config.get("flags")).get("plugin"))

    def setting(flag: str, variable: str, key: str) -> Any:
        """Return a setting from the flag, else from the environment, else from the file."""
        return flags.get(flag) or environment.get(variable) or own.get(key)

    strategies = setting("device-list-strategy", "DEVICE_LIST_STRATEGY", "deviceListStrategy")
    if isinstance(strategies, str) or strategies is None:
        strategies = (strategies or "envvar").split(",")
    # Only strings are reported, because other values could be arbitrarily large.
    if not all(isinstance(each, str) for each in strategies):
        raise ValueError("a strategy is not a string")
    policy = setting(
        "shared-devices-allocation-policy",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "sharedDevicesAllocationPolicy",
    )
    sharing, replicas, rejects = _sharing(_mapping(config.get("sharing")))
    return PluginReading(
        PLUGIN,
        sharing,
        replicas,
        "packed" if policy == "packed" else "distributed",  # the only policy before v0.20
        tuple(sorted({each.strip() for each in strategies})),
        rejects,
    )


def _sharing(sharing: Mapping[str, Any]) -> tuple[Sharing, dict[str, int], bool | None]:
    """Return the strategy, the replicas per advertised resource, and whether requests for more than
    one replica are rejected (None if unknown).

    If both strategies are configured, MPS applies. With MPS the plugin rejects such requests by
    default, and before v0.20 always, so ``failRequestsGreaterThanOne: false`` proves nothing.
    """
    kinds: tuple[tuple[Literal["mps", "time-slicing"], str], ...] = (
        ("mps", "mps"),
        ("time-slicing", "timeSlicing"),
    )
    for kind, key in kinds:
        part = _mapping(sharing.get(key))
        suffix = ".shared" if part.get("renameByDefault") is True else ""
        replicas: dict[str, int] = {}
        for each in part.get("resources") or ():
            count, name = _mapping(each).get("replicas"), _mapping(each).get("name")
            if isinstance(count, int) and isinstance(name, str) and 1 < count <= MAX_REPLICAS:
                full = name if "/" in name else f"nvidia.com/{name}"
                replicas[full + suffix] = count
        if replicas:
            rejects = part.get("failRequestsGreaterThanOne")
            if kind == "mps":
                return kind, replicas, None if rejects is False else True
            return kind, replicas, rejects is True
    return "none", {}, False


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return ``value`` as a mapping, which is empty for None. Raises ``ValueError``."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return value
