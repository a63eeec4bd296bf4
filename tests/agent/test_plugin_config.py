"""Tests that the configuration of the plugin, the toolkit and the kubelet is read from a recorded
/proc.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.probes.host_processes import Hidden
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.readings import PluginReading
from tests.agent.host import GPU, Tree, pipe, plugin, policy, read
from tests.agent.test_kubelet_config import kubelet

KEYS = st.sampled_from(
    [
        *("flags", "plugin", "deviceListStrategy", "sharing", "timeSlicing", "mps"),
        *("resources", "name", "replicas", "topologyManagerPolicy"),
    ]
)
TIME_SLICING = {
    "version": "v1",
    "sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 4}]}},
}


#: A YAML file of a few hundred bytes that expands to 10^12 keys.
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 13)
)


def test_a_plugin_without_configuration_has_its_defaults(tree: Tree) -> None:
    tree.process(200, "nvidia-device-plugin")
    assert plugin(tree) == PluginReading("plugin", "none", {}, "distributed", ("envvar",), False)


def test_flags_override_the_environment_and_the_environment_overrides_the_file(tree: Tree) -> None:
    own = {"deviceListStrategy": "volume-mounts", "sharedDevicesAllocationPolicy": "packed"}
    tree.plugin(
        TIME_SLICING | {"flags": {"plugin": own}},
        "--device-list-strategy",
        "cdi-cri",
        DEVICE_LIST_STRATEGY="envvar",
    )
    found = plugin(tree)
    assert found.device_list_strategy == ("cdi-cri",)
    assert found.allocation_policy == "packed"
    assert (found.sharing, found.replicas) == ("time-slicing", {GPU: 4})


def test_a_process_that_ends_while_it_is_read_is_absent(tree: Tree) -> None:
    """The kernel still lists an ended process until its parent waits for it."""
    tree.plugin(TIME_SLICING)
    tree.process(300, "kubelet")
    probe = tree.probe()
    assert {each.state for each in read(probe)[1].values()} == {"ok"}
    for pid in (200, 300):
        (tree.root / str(pid) / "cmdline").write_text("")
    shown, sources = read(probe)
    assert shown == []
    assert {each.state for each in sources.values()} == {"absent"}


def test_the_environment_of_the_gpu_operator_is_read(tree: Tree) -> None:
    tree.plugin(TIME_SLICING, DEVICE_LIST_STRATEGY="cdi-annotations,cdi-cri")
    assert plugin(tree).device_list_strategy == ("cdi-annotations", "cdi-cri")


@pytest.mark.parametrize(
    ("sharing", "kind", "replicas", "rejects"),
    [
        pytest.param(
            {"timeSlicing": {"renameByDefault": True, "resources": [{"name": GPU, "replicas": 2}]}},
            "time-slicing",
            {f"{GPU}.shared": 2},
            False,
            id="renamed",
        ),
        pytest.param(
            {
                "timeSlicing": {
                    "failRequestsGreaterThanOne": True,
                    "resources": [{"name": "gpu", "replicas": 2}],
                }
            },
            "time-slicing",
            {GPU: 2},
            True,
            id="several are rejected; a name without its domain",
        ),
        pytest.param(
            {"mps": {"resources": [{"name": GPU, "replicas": 3}]}},
            "mps",
            {GPU: 3},
            True,
            id="mps: rejected by default",
        ),
        pytest.param(
            {
                "mps": {
                    "failRequestsGreaterThanOne": False,
                    "resources": [{"name": GPU, "replicas": 3}],
                },
                "timeSlicing": {"resources": [{"name": GPU, "replicas": 9}]},
            },
            "mps",
            {GPU: 3},
            None,
            id="mps wins; before v0.20 it does not listen",
        ),
        pytest.param({"timeSlicing": {"resources": []}}, "none", {}, False, id="empty"),
        pytest.param(None, "none", {}, False, id="none"),
    ],
)
def test_sharing_is_read_as_by_the_plugin(
    tree: Tree, sharing: object, kind: str, replicas: dict[str, int], rejects: bool | None
) -> None:
    tree.plugin({"version": "v1", "sharing": sharing})
    found = plugin(tree)
    assert (found.sharing, found.replicas) == (kind, replicas)
    assert found.fail_requests_greater_than_one is rejects


def test_a_replaced_file_is_read_again(tree: Tree) -> None:
    folder = tree.plugin(TIME_SLICING)
    probe = tree.probe()
    read(probe)
    tree.configure(folder, {"version": "v1"})
    ((found,), _) = read(probe)
    assert isinstance(found, PluginReading)
    assert found.sharing == "none"


def test_a_restarted_plugin_is_found_again(tree: Tree) -> None:
    probe = tree.probe()
    shutil.rmtree(tree.plugin(TIME_SLICING))
    tree.process(201, "nvidia-device-plugin")
    assert read(probe)[1]["plugin"].state == "ok"
    shutil.rmtree(tree.root / "201")
    assert read(probe)[1]["plugin"].state == "absent"
    tree.process(202, "nvidia-device-plugin")
    assert read(probe)[1]["plugin"].state == "ok"


def test_a_socket_without_a_listener_is_tried_again(tree: Tree) -> None:
    probe = tree.probe()
    tree.listen("nvidia-gpu.sock", 200)
    assert read(probe)[1]["plugin"].state == "absent"
    tree.process(200, "a-plugin")
    for _ in range(12):  # The file is not read in every cycle.
        state = read(probe)[1]["plugin"].state
    assert state == "ok"


def test_a_process_with_only_the_plugins_name_is_not_used(tree: Tree) -> None:
    tree.plugin(TIME_SLICING)
    for pid, name in ((400, "nvidia-device-p"), (401, "kubelet")):
        tree.process(pid, f"{name}x", "--config-file=/elsewhere")
        (tree.root / str(pid) / "comm").write_text(f"{name}\n")
    tree.process(300, "kubelet")
    assert plugin(tree).replicas == {GPU: 4}
    assert policy(tree) == "none"


def test_gkes_own_plugin_is_not_read_as_nvidias(tree: Tree) -> None:
    """GKE's plugin has another policy, other files, and other defaults than NVIDIA's plugin."""
    tree.process(199, "nvidia-gpu-device-plugin", "-enable-container-gpu-metrics")
    tree.listen("nvidiaGPU-1700000000.sock", 199)
    shown, sources = read(tree.probe())
    assert shown == []
    assert sources["plugin"].state == "absent"
    assert "GKE" in sources["plugin"].message
    tree.plugin(TIME_SLICING)  # NVIDIA's plugin on the same node is read.
    assert plugin(tree).replicas == {GPU: 4}


def test_processes_of_another_pid_namespace_are_reported_with_a_fix(tree: Tree) -> None:
    tree.plugin(TIME_SLICING)

    def hidden(_: Path) -> int:
        raise Hidden("hidden")

    shown, sources = read(ConfigurationProbe(tree.root, tree.sockets, hidden))
    assert shown == []
    assert sources["plugin"].state == "degraded"
    assert "hostPID: true" in sources["plugin"].message


def test_a_hanging_file_system_delays_no_sample(tree: Tree) -> None:
    """For example, the command line of a process is in a file of a FUSE server that sleeps."""
    released = threading.Event()

    def sleeping(_: Path) -> int:
        released.wait()
        raise OSError

    tree.plugin(TIME_SLICING)
    probe = ConfigurationProbe(tree.root, tree.sockets, sleeping, read_s=0.05)
    for _ in range(2):
        shown, sources = read(probe)
        assert shown == []
        assert {each.state for each in sources.values()} == {"degraded"}
        assert "takes too long" in sources["kubelet"].message
    released.set()


@pytest.mark.parametrize(
    ("spoil", "reported"),
    [
        pytest.param(lambda f: (f / "environ").unlink(), "CAP_SYS_PTRACE", id="unreadable process"),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").unlink(),
            "/config/config.yaml: No such file or directory",
            id="no file",
        ),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").write_text("a: b: c"),
            "ValueError",
            id="not YAML",
        ),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").write_text("[1]"),
            "ValueError",
            id="YAML of another kind",
        ),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").write_bytes(b"\xff"),
            "UnicodeDecodeError",
            id="not text",
        ),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").write_text(MERGES), "ValueError", id="aliases"
        ),
        pytest.param(
            lambda f: pipe(f / "root/config/config.yaml"), "is not a regular file", id="a pipe"
        ),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").write_text(f"version: {'1:' * 5000}1"),
            "ValueError",
            id="a sexagesimal number that takes minutes to compute",
        ),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").write_text("<<: {version: v1}"),
            "ValueError",
            id="a merge key",
        ),
        pytest.param(
            lambda f: (f / "root/config/config.yaml").write_text("version: v1\n" + "#" * (1 << 18)),
            "ValueError",
            id="too long",
        ),
        *(
            pytest.param(
                lambda f, text=text: (f / "root/config/config.yaml").write_text(text),
                "ValueError",
                id=f"a tag that lies: {text}",
            )
            for text in ("version: !!bool maybe", "version: !!timestamp then", "version: !!int ''")
        ),
    ],
)
def test_an_unreadable_plugin_configuration_is_reported_and_not_guessed(
    tree: Tree, spoil: Callable[[Path], object], reported: str
) -> None:
    spoil(tree.plugin(TIME_SLICING))
    shown, sources = read(tree.probe())
    assert shown == []
    assert sources["plugin"].state == "degraded"
    assert reported in sources["plugin"].message


def test_with_two_plugins_neither_is_used(tree: Tree) -> None:
    for pid in (200, 201):
        tree.process(pid, "nvidia-device-plugin")
    shown, sources = read(tree.probe())
    assert shown == []
    assert sources["plugin"].state == "degraded"


def test_the_toolkit_configuration_is_read_from_the_operators_path_or_else_from_the_packages(
    tree: Tree,
) -> None:
    tree.plugin(TIME_SLICING)
    assert plugin(tree).toolkit_ignores_environment is False
    root = tree.process(1, "systemd") / "root"
    package = root / "etc/nvidia-container-runtime/config.toml"
    package.parent.mkdir(parents=True)
    package.write_text("")
    assert plugin(tree).toolkit_ignores_environment is False
    own = root / "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
    own.parent.mkdir(parents=True)
    own.write_text("accept-nvidia-visible-devices-envvar-when-unprivileged = false")
    assert plugin(tree).toolkit_ignores_environment is True
    for deep in (
        "a = " + 20_000 * "[",
        "a." * 4500 + "b = 1",
    ):  # nested more deeply than the parser supports
        own.write_text(deep)
        assert plugin(tree).toolkit_ignores_environment is False


_BOMB = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(n)}: &{chr(n)} [{','.join([f'*{chr(n - 1)}'] * 8)}]\n" for n in range(98, 107)
)


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(
            _BOMB + "flags: {plugin: {deviceListStrategy: *j, passDeviceSpecs: *j}}\n",
            id="aliases",
        ),
        pytest.param("flags: " + "[" * 3000, id="depth"),
        pytest.param("flags: " + "[" * 200_000, id="more depth"),
    ],
)
def test_a_too_deeply_nested_configuration_is_not_read(tree: Tree, bomb: str) -> None:
    tree.plugin(bomb)
    _, sources = read(tree.probe())
    assert "cannot be read" in sources["plugin"].message


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(ANYTHING)
def test_the_probe_reports_or_gives_a_reason_whatever_the_files_contain(
    tmp_path: Path, content: object
) -> None:
    root = tmp_path / "any"
    shutil.rmtree(root, ignore_errors=True)
    tree = Tree(root)
    tree.plugin(yaml.safe_dump(content))
    kubelet(tree, "--config=/etc/k.yaml", k_yaml=yaml.safe_dump(content))
    shown, sources = read(tree.probe())
    assert len(shown) == [source.state for source in sources.values()].count("ok")
