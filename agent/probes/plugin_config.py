"""Reads the configuration of device plugin, container toolkit and kubelet from their processes.

Plugin and kubelet are found by their sockets in the kubelet's directory: whichever process listens
there is the plugin or the kubelet. Process names and install paths differ between distributions.

The plugin uses its flags first, then its environment, then its file. All three can be read through
/proc by root with CAP_SYS_PTRACE. Files are read again only if they changed: the plugin's
config-manager replaces the file and signals the plugin, whose process stays. All reads share one
deadline, because a file, and even a command line, can be on a file system that does not answer.
"""

import os
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agent.deadline import Hanging, Worker
from agent.probes.pinning import obeys_environment
from agent.probes.readings import (
    TOPOLOGY_POLICIES,
    PluginReading,
    Reading,
    SourceReading,
    TopologyReading,
)
from agent.probes.socket_peer import Hidden, listener
from contract.gpunode import MAX_REPLICAS, Sharing

PLUGIN = "plugin"
KUBELET = "kubelet"

#: The sockets of NVIDIA's plugin, one for each resource, and the kubelet's own.
_PLUGIN_SOCKETS = "nvidia-*.sock"
_KUBELET_SOCKET = "kubelet.sock"
#: Sockets of GKE's own device plugin (container-engine-accelerators), which has other flags.
_GKE_SOCKETS = "nvidiaGPU-*.sock"
#: Cycles before a socket that no process listens on is tried again.
_RETRY_EVERY = 12
#: Seconds that all reads of one cycle may take together.
READ_S = 2.0
_MOST_BYTES = 1 << 20
#: Maximum size of a file: parsing takes some hundred times its size, and 3 s for each MiB.
_MOST_FILE_BYTES = 256 << 10
_MOST_DEPTH = 64
#: Maximum length of a YAML value, which can be a number to the base of 60.
_MOST_VALUE_CHARS = 4096
#: Maximum of dots in a line of TOML. Each creates a table, whose full name the decoder keeps.
_MOST_DOTS = 64
#: k3s runs the kubelet in its own process, whose arguments it hides, and adds these files to its
#: configuration.
_K3S = ("k3s", "k3s-server", "k3s-agent")
_K3S_FILES = "/var/lib/rancher/k3s/agent/etc/kubelet.conf.d"
#: Configuration files of the toolkit, as installed by the GPU Operator and by its packages.
_TOOLKIT = (
    "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
    "/etc/nvidia-container-runtime/config.toml",
)


@dataclass(frozen=True, slots=True)
class _Listener:
    """The process that listens on one socket, or why there is none."""

    #: Inode and time of change of the socket.
    socket: tuple[int, int]
    pid: int = 0
    #: Start time of the process, because a pid can be reused.
    start: str = ""
    #: Whether the process is outside the agent's PID namespace.
    hidden: bool = False


class ConfigurationProbe:
    """Reads the configuration of device plugin and kubelet.

    ``root`` is the host's /proc. ``sockets`` is the kubelet's directory of device plugins.
    ``listening`` returns the pid behind a socket, like ``agent.probes.socket_peer.listener``.
    """

    def __init__(
        self,
        root: Path,
        sockets: Path,
        listening: Callable[[Path], int] = listener,
        read_s: float = READ_S,
    ) -> None:
        self._root = root
        self._sockets = sockets
        self._listening = listening
        self._read_s = read_s
        self._worker: Worker[list[Reading]] = Worker("configuration")
        self._cycle = 0
        self._found: dict[Path, _Listener] = {}
        self._parsed: dict[Path, tuple[tuple[int, int, int], Any]] = {}

    def read(self) -> Iterable[Reading]:
        try:
            if self._worker.give(self._read):
                return self._worker.result(time.monotonic() + self._read_s)
        except Hanging:
            pass
        why = "reading its configuration takes too long"
        return [SourceReading(source, "degraded", why) for source in (PLUGIN, KUBELET)]

    def _read(self) -> list[Reading]:
        self._look()
        return [*self._plugin(), *self._kubelet()]

    def _look(self) -> None:
        plugins = (*self._sockets.glob(_PLUGIN_SOCKETS), *self._sockets.glob(_GKE_SOCKETS))
        paths = [*plugins, self._sockets / _KUBELET_SOCKET]
        self._found = {
            path: found for path in sorted(paths) if (found := self._listener(path)) is not None
        }
        self._cycle += 1

    def _listener(self, path: Path) -> _Listener | None:
        """Return the process that listens on a socket; None if there is no socket."""
        try:
            there = path.stat()
        except OSError:
            return None
        socket = (there.st_ino, there.st_ctime_ns)
        known = self._found.get(path)
        if known is not None and known.socket == socket:
            # Do not connect again while the same process has the same socket.
            if known.pid and self._start(known.pid) == known.start:
                return known
            if not known.pid and self._cycle % _RETRY_EVERY:
                return known
        try:
            pid = self._listening(path)
        except Hidden:
            return _Listener(socket, hidden=True)
        except OSError:
            return _Listener(socket)
        return _Listener(socket, pid, self._start(pid))

    def _start(self, pid: int) -> str:
        """Return the start time of a process; empty if it has ended."""
        values = (_text(self._root / str(pid) / "stat") or "").rpartition(")")[2].split()
        return values[19] if len(values) > 19 else ""

    def _only(self, name: str, sockets: str, source: str) -> tuple[Path | None, Reading]:
        """Return the /proc directory of the only process that listens, or why there is none."""
        listeners = [each for path, each in self._found.items() if path.match(sockets)]
        if any(each.hidden for each in listeners):
            why = f"{name} is not in the agent's PID namespace: the agent needs hostPID: true"
            return None, SourceReading(source, "degraded", why)
        match sorted({each.pid for each in listeners if each.start}):
            # A process that is ending has no command line.
            case [pid] if _text(self._root / str(pid) / "cmdline"):
                return self._root / str(pid), SourceReading(source)
            case [_]:
                return None, SourceReading(source, "absent", f"{name} is ending")
            case []:
                return None, SourceReading(source, "absent", f"no {name} listens on its socket")
        return None, SourceReading(source, "degraded", f"several processes listen as {name}")

    def _plugin(self) -> Iterable[Reading]:
        process, source = self._only("device plugin", _PLUGIN_SOCKETS, PLUGIN)
        if process is None and self._only("device plugin", _GKE_SOCKETS, PLUGIN)[0] is not None:
            why = "it is GKE's own: the labels of the node show how it shares"
            return [SourceReading(PLUGIN, "absent", why)]
        if process is None:
            return [source]
        flags, environment = _flags(process), _environment(process)
        if environment is None:
            why = "environment of the device plugin cannot be read: CAP_SYS_PTRACE is missing"
            return [SourceReading(PLUGIN, "degraded", why)]
        path = flags.get("config-file") or environment.get("CONFIG_FILE")
        try:
            file = self._file(process, path) if path else {}
            reading = _plugin_reading(flags, environment, file)
        except (OSError, ValueError, TypeError) as err:  # the file may contain any YAML
            why = f"configuration of the device plugin cannot be read ({type(err).__name__})"
            return [SourceReading(PLUGIN, "degraded", why)]
        return [replace(reading, toolkit_obeys_environment=self._toolkit()), source]

    def _toolkit(self) -> bool | None:
        for path in _TOOLKIT:
            try:
                return obeys_environment(self._file(self._root / "1", path))
            except (OSError, ValueError):
                continue
        return None

    def _kubelet(self) -> Iterable[Reading]:
        process, source = self._only("kubelet", _KUBELET_SOCKET, KUBELET)
        if process is None:
            return [source]
        try:
            policy = self._topology_policy(process)
        except (OSError, ValueError, TypeError) as err:
            why = f"configuration of the kubelet cannot be read ({type(err).__name__})"
            return [SourceReading(KUBELET, "degraded", why)]
        if policy is None:
            why = "k3s hides the kubelet's flags, and its files set no topology manager policy"
            return [SourceReading(KUBELET, "absent", why)]
        return [TopologyReading(KUBELET, policy), source]

    def _topology_policy(self, process: Path) -> str | None:
        """Return the topology manager policy; None if hidden flags may set it."""
        flags = _flags(process)
        hidden = (_text(process / "comm") or "").strip() in _K3S
        if hidden:
            flags = {"config-dir": _K3S_FILES}
        policy = flags.get("topology-manager-policy", "")
        files = [flags["config"]] if "config" in flags else []
        if "config-dir" in flags:
            # Drop-in files override the configuration file, in the order of their names.
            folder = _inside(process, flags["config-dir"])
            files += sorted(str(each) for each in _configs(folder, process))
        for path in reversed(files):
            if policy:
                break
            policy = _mapping(self._file(process, path)).get("topologyManagerPolicy") or ""
        if hidden and not policy:
            return None
        policy = policy or "none"
        if policy not in TOPOLOGY_POLICIES:
            raise ValueError("not a topology manager policy")
        return policy

    def _file(self, process: Path, path: str) -> Any:
        """Return a decoded YAML or TOML file of a process's mount namespace.

        Raises ``OSError`` and ``ValueError``.
        """
        there = _inside(process, path)
        # Reading a pipe or a device might not end.
        with open(os.open(there, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path} is not a regular file")
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            last = self._parsed.get(there)
            if last is None or last[0] != signature:
                text = file.read(_MOST_FILE_BYTES + 1).decode()
                if len(text) > _MOST_FILE_BYTES:
                    raise ValueError(f"{path} is longer than {_MOST_FILE_BYTES} bytes")
                read = _decoded(text, toml=path.endswith(".toml"))
                last = self._parsed[there] = (signature, read)
        return last[1]


def _inside(process: Path, path: str) -> Path:
    """Return ``path`` as seen by the process, through its ``root`` or ``cwd`` in /proc."""
    own = Path(path)
    return process / ("root" if own.is_absolute() else "cwd") / path.lstrip("/")


def _configs(folder: Path, process: Path) -> Iterable[str]:
    root = str(process / "root")
    return (str(each).removeprefix(root) for each in folder.glob("*.conf"))


def _decoded(text: str, toml: bool) -> Any:
    """Decode TOML or YAML. Raises ``ValueError``."""
    if toml:
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
            raise ValueError("too many nested tables in one line")
        try:
            return tomllib.loads(text)
        except RecursionError as err:
            raise ValueError("not TOML") from err
    try:
        import yaml
    except ImportError as err:
        raise ValueError("Python package pyyaml is missing") from err
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader, if it is installed
    depth = 0
    try:
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.AliasEvent):  # a few hundred bytes can expand to gigabytes
                raise ValueError("aliases are not supported")
            if isinstance(event, yaml.ScalarEvent):
                if event.value == "<<":
                    raise ValueError("merge keys are not supported")
                if len(event.value) > _MOST_VALUE_CHARS:
                    raise ValueError("a value is too long")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:  # each level uses stack, and an overflow ends the process
                raise ValueError("nested too deeply")
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError, LookupError, AttributeError) as err:
        # The last two are raised if a value does not match its tag, as in "!!bool maybe".
        raise ValueError("not YAML") from err


def _plugin_reading(
    flags: Mapping[str, str], environment: Mapping[str, str], file: Any
) -> PluginReading:
    """Combine flags, environment and file. Raises ``ValueError`` if the file is invalid."""
    config = _mapping(file)
    own = _mapping(_mapping(config.get("flags")).get("plugin"))

    def setting(flag: str, variable: str, key: str) -> Any:
        return flags.get(flag) or environment.get(variable) or own.get(key)

    strategies = setting("device-list-strategy", "DEVICE_LIST_STRATEGY", "deviceListStrategy")
    if isinstance(strategies, str) or strategies is None:
        strategies = (strategies or "envvar").split(",")
    # Only strings are reported: other values could be arbitrarily large.
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
        passes_device_specs=_switched_on(
            setting("pass-device-specs", "PASS_DEVICE_SPECS", "passDeviceSpecs"),
            "pass-device-specs" in flags,
        ),
    )


def _switched_on(value: Any, named: bool) -> bool:
    """Return whether a boolean setting is on; a flag without a value counts as on."""
    if value is None or value == "":
        return named
    return isinstance(value, bool | int | str) and str(value).lower() in ("1", "t", "true")


def _sharing(sharing: Mapping[str, Any]) -> tuple[Sharing, dict[str, int], bool | None]:
    """Return strategy, resource as advertised -> replicas, and whether requests for more than one
    replica are rejected (None: unknown).

    If both strategies are configured, MPS applies. With MPS the plugin rejects such requests by
    default, and before v0.20 always. So ``failRequestsGreaterThanOne: false`` proves nothing.
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
    """Return ``value`` as a mapping; None counts as empty. Raises ``ValueError``."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return value


def _flags(process: Path) -> dict[str, str]:
    """Return the flags of a process; see ``parse_flags``."""
    arguments = (_text(process / "cmdline") or "").split("\0")[1:]
    return parse_flags(arguments)


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Parse --name=value and --name value; values of a repeated flag are joined with commas."""
    found: dict[str, str] = {}
    # The list is empty if the process has ended.
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=False):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals and not after.startswith("-"):
            value = after
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


def _environment(process: Path) -> dict[str, str] | None:
    text = _text(process / "environ")
    if text is None:
        return None
    pairs = (pair.partition("=") for pair in text.split("\0") if pair)
    return {name: value for name, _, value in pairs}


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
