"""How device plugin, container toolkit and kubelet are configured, as their processes show it.

The plugin reads flags, then its environment, then a file, the first that says something counts; all
three are there for a reader of /proc who may look into processes (root with CAP_SYS_PTRACE).
Processes are looked for seldom and their files read when they changed: the plugin's config-manager
replaces the file and signals the plugin, whose process stays.
"""

import os
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from agent.pinning import obeys_environment
from agent.probes import (
    TOPOLOGY_POLICIES,
    PluginReading,
    Reading,
    SourceReading,
    TopologyReading,
)
from contract.gpunode import MAX_REPLICAS, Sharing

PLUGIN = "plugin"
KUBELET = "kubelet"

#: The kernel keeps 15 characters of a command.
_PLUGIN_COMMAND = "nvidia-device-plugin"[:15]
_KUBELET_COMMAND = "kubelet"
#: Cycles between two looks at all processes of the node.
_LOOK_EVERY = 12
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 64
#: Dots in a line of TOML: each is one more table, whose whole name the decoder keeps.
_MOST_DOTS = 64
#: Of the toolkit: as the GPU Operator installs it, and as its packages do.
_TOOLKIT = (
    "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
    "/etc/nvidia-container-runtime/config.toml",
)


class ConfigurationProbe:
    """``root`` is /proc or where the host's is mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cycle = 0
        #: pid and start of what was found, by command; a pid alone is given out again.
        self._found: dict[str, list[tuple[int, str]]] = {}
        self._parsed: dict[Path, tuple[tuple[int, int, int], Any]] = {}

    def read(self) -> Iterable[Reading]:
        self._look()
        yield from self._plugin()
        yield from self._kubelet()

    def _look(self) -> None:
        there = {
            command: [(pid, start) for pid, start in found if self._start(pid) == start]
            for command, found in self._found.items()
        }
        missing = any(not there.get(command) for command in (_PLUGIN_COMMAND, _KUBELET_COMMAND))
        lost = self._found != there
        if lost or (missing and self._cycle % _LOOK_EVERY == 0):
            there = {_PLUGIN_COMMAND: [], _KUBELET_COMMAND: []}
            for folder in self._processes():
                command = (_text(folder / "comm") or "").rstrip("\n")
                if command in there:
                    pid = int(folder.name)
                    there[command].append((pid, self._start(pid)))
        self._found = there
        self._cycle += 1

    def _processes(self) -> list[Path]:
        try:
            return [each for each in self._root.iterdir() if each.name.isdecimal()]
        except OSError:
            return []

    def _start(self, pid: int) -> str:
        """When it started; empty where it is gone."""
        values = (_text(self._root / str(pid) / "stat") or "").rpartition(")")[2].split()
        return values[19] if len(values) > 19 else ""

    def _only(self, command: str, source: str) -> tuple[Path | None, Reading]:
        """The folder of the only process of that name, or how that failed."""
        match self._found.get(command, []):
            # One that ends has no command line any more.
            case [(pid, _)] if _text(self._root / str(pid) / "cmdline"):
                return self._root / str(pid), SourceReading(source)
            case [_]:
                return None, SourceReading(source, "absent", f"process {command} ends")
            case []:
                return None, SourceReading(source, "absent", f"no process {command} is seen")
        return None, SourceReading(source, "degraded", f"several processes {command} are seen")

    def _plugin(self) -> Iterable[Reading]:
        process, source = self._only(_PLUGIN_COMMAND, PLUGIN)
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
        except (OSError, ValueError, TypeError) as err:  # it may hold anything that YAML can say
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
        process, source = self._only(_KUBELET_COMMAND, KUBELET)
        if process is None:
            return [source]
        try:
            policy = self._topology_policy(process)
        except (OSError, ValueError, TypeError) as err:
            why = f"configuration of the kubelet cannot be read ({type(err).__name__})"
            return [SourceReading(KUBELET, "degraded", why)]
        return [TopologyReading(KUBELET, policy), source]

    def _topology_policy(self, process: Path) -> str:
        flags = _flags(process)
        policy = flags.get("topology-manager-policy", "")
        files = [flags["config"]] if "config" in flags else []
        if "config-dir" in flags:
            # Files in there replace what the configuration says, in the order of their names.
            folder = _inside(process, flags["config-dir"])
            files += sorted(str(each) for each in _configs(folder, process))
        for path in reversed(files):
            if policy:
                break
            policy = _mapping(self._file(process, path)).get("topologyManagerPolicy") or ""
        policy = policy or "none"
        if policy not in TOPOLOGY_POLICIES:
            raise ValueError("no policy of the topology manager")
        return policy

    def _file(self, process: Path, path: str) -> Any:
        """A YAML or TOML file as a process sees it. Raises ``OSError`` and ``ValueError``."""
        there = _inside(process, path)
        # Any pod can have a process of that name, and a pipe or a device would never end.
        with open(os.open(there, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path} is no regular file")
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            last = self._parsed.get(there)
            if last is None or last[0] != signature:
                text = file.read(_MOST_BYTES).decode()
                read = _decoded(text, toml=path.endswith(".toml"))
                last = self._parsed[there] = (signature, read)
        return last[1]


def _inside(process: Path, path: str) -> Path:
    """``path`` as the process would open it; ``cwd`` lies in its own mounts, as ``root`` does."""
    own = Path(path)
    return process / ("root" if own.is_absolute() else "cwd") / path.lstrip("/")


def _configs(folder: Path, process: Path) -> Iterable[str]:
    root = str(process / "root")
    return (str(each).removeprefix(root) for each in folder.glob("*.conf"))


def _decoded(text: str, toml: bool) -> Any:
    """Raises ``ValueError``."""
    if toml:
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
            raise ValueError("names tables without end")
        try:
            return tomllib.loads(text)
        except RecursionError as err:
            raise ValueError("no TOML") from err
    try:
        import yaml
    except ImportError as err:
        raise ValueError("Python package pyyaml is missing") from err
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # where there is one in C
    depth = 0
    try:
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.AliasEvent):  # a few hundred bytes can stand for gigabytes
                raise ValueError("aliases are not read")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:  # each level is one of the stack, which ends the process
                raise ValueError("nested too deeply")
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError, LookupError, AttributeError) as err:
        # The last two where a value is not what its tag says, as in "!!bool maybe".
        raise ValueError("no YAML") from err


def _plugin_reading(
    flags: Mapping[str, str], environment: Mapping[str, str], file: Any
) -> PluginReading:
    """Raises ``ValueError`` where the file is not the plugin's."""
    config = _mapping(file)
    own = _mapping(_mapping(config.get("flags")).get("plugin"))

    def setting(flag: str, variable: str, key: str) -> Any:
        return flags.get(flag) or environment.get(variable) or own.get(key)

    strategies = setting("device-list-strategy", "DEVICE_LIST_STRATEGY", "deviceListStrategy")
    if isinstance(strategies, str) or strategies is None:
        strategies = (strategies or "envvar").split(",")
    # Nothing else is printed: aliases within aliases have no end.
    if not all(isinstance(each, str) for each in strategies):
        raise ValueError("a strategy is no word")
    policy = setting(
        "shared-devices-allocation-policy",
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "sharedDevicesAllocationPolicy",
    )
    sharing, replicas, refuses = _sharing(_mapping(config.get("sharing")))
    return PluginReading(
        PLUGIN,
        sharing,
        replicas,
        "packed" if policy == "packed" else "distributed",  # the only one before v0.20
        tuple(sorted({each.strip() for each in strategies})),
        refuses,
        passes_device_specs=_switched_on(
            setting("pass-device-specs", "PASS_DEVICE_SPECS", "passDeviceSpecs"),
            "pass-device-specs" in flags,
        ),
    )


def _switched_on(value: Any, named: bool) -> bool:
    """Of a setting that is a switch: a flag that is named without a value counts as on."""
    if value is None or value == "":
        return named
    return isinstance(value, bool | int | str) and str(value).lower() in ("1", "t", "true")


def _sharing(sharing: Mapping[str, Any]) -> tuple[Sharing, dict[str, int], bool | None]:
    """Strategy, replicas by resource as advertised, and whether several are refused.

    MPS wins where both are configured. With MPS the plugin refuses several by default, and before
    v0.20 in any case: that it was told not to proves nothing.
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
            refuses = part.get("failRequestsGreaterThanOne")
            if kind == "mps":
                return kind, replicas, None if refuses is False else True
            return kind, replicas, refuses is True
    return "none", {}, False


def _mapping(value: Any) -> Mapping[str, Any]:
    """Raises ``ValueError`` where it is something else; what is not there is empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return value


def _flags(process: Path) -> dict[str, str]:
    """--name=value and --name value; of a flag that comes twice the values are joined."""
    arguments = (_text(process / "cmdline") or "").split("\0")[1:]
    return parse_flags(arguments)


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    # Of a process that ended meanwhile there are none.
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
