"""Simulates the processes and files of a host in a folder."""

import os
from pathlib import Path

import yaml

from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.readings import PluginReading, Reading, SourceReading, TopologyReading

GPU = "nvidia.com/gpu"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class Tree:
    """Writes a /proc with simulated processes and the sockets on which they listen."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.sockets = root / "device-plugins"
        self.sockets.mkdir()
        self._listeners: dict[str, int] = {}
        self._starts = iter(range(1000, 9000))

    def probe(self) -> ConfigurationProbe:
        return ConfigurationProbe(self.root, self.sockets, self._listener)

    def listen(self, name: str, pid: int) -> None:
        path = self.sockets / name
        path.unlink(missing_ok=True)
        path.touch()
        self._listeners[name] = pid

    def _listener(self, path: Path) -> int:
        if not (self.root / str(self._listeners[path.name])).exists():
            raise ConnectionRefusedError
        return self._listeners[path.name]

    def process(
        self, pid: int, command: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> Path:
        folder = self.root / str(pid)
        (folder / "root").mkdir(parents=True)
        (folder / "comm").write_text(f"{command[:15]}\n")
        start = next(self._starts)
        (folder / "stat").write_text(f"{pid} ({command[:15]}) S " + "0 " * 18 + f"{start} 0")
        (folder / "cmdline").write_text("\0".join([command, *arguments, ""]))
        pairs = [f"{key}={value}\0" for key, value in (environment or {}).items()]
        (folder / "environ").write_text("".join(pairs))
        if command == "nvidia-device-plugin":
            self.listen(f"nvidia-gpu-{pid}.sock", pid)
        elif command in ("kubelet", "k3s"):
            self.listen("kubelet.sock", pid)
        return folder

    def plugin(self, config: object = None, *arguments: str, **environment: str) -> Path:
        folder = self.process(
            200,
            "nvidia-device-plugin",
            "--config-file=/config/config.yaml",
            *arguments,
            environment=environment,
        )
        self.configure(folder, config)
        return folder

    def configure(self, folder: Path, config: object) -> None:
        (folder / "root/config").mkdir(exist_ok=True)
        text = config if isinstance(config, str) else yaml.safe_dump(config)
        (folder / "root/config/config.yaml").write_text(text)


def read(probe: ConfigurationProbe) -> tuple[list[Reading], dict[str, SourceReading]]:
    found = list(probe.read())
    shown = [r for r in found if not isinstance(r, SourceReading)]
    return shown, {r.source: r for r in found if isinstance(r, SourceReading)}


def plugin(tree: Tree) -> PluginReading:
    shown, sources = read(tree.probe())
    assert sources["plugin"].state == "ok", sources
    (reading,) = [r for r in shown if isinstance(r, PluginReading)]
    return reading


def policy(tree: Tree) -> str:
    shown, sources = read(tree.probe())
    assert sources["kubelet"].state == "ok", sources
    (reading,) = [r for r in shown if isinstance(r, TopologyReading)]
    return reading.policy
