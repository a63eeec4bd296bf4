"""Tests that the kubelet's topology policy is read from its files and flags, on each
distribution.
"""

import shutil

import pytest

from agent.probes.host_processes import parse_flags
from agent.probes.plugin_config import ConfigurationProbe
from tests.agent.host import Tree, policy, read

#: For each distribution, the kubelet's arguments, the configuration file, its content, and the
#: expected policy.
LAYOUTS = [
    pytest.param(
        ("--config=/var/lib/kubelet/config.yaml", "--container-runtime-endpoint=unix:///x"),
        ("var/lib/kubelet/config.yaml", "topologyManagerPolicy: restricted"),
        id="kubeadm",
    ),
    pytest.param(
        ("--config", "/home/kubernetes/kubelet-config.yaml"),
        ("home/kubernetes/kubelet-config.yaml", "topologyManagerPolicy: restricted"),
        id="GKE",
    ),
    pytest.param(
        (
            "--config",
            "/etc/kubernetes/kubelet/config.json",
            "--config-dir",
            "/etc/kubernetes/kubelet/config.json.d",
        ),
        ("etc/kubernetes/kubelet/config.json", '{"topologyManagerPolicy": "restricted"}'),
        id="EKS",
    ),
    pytest.param(
        ("--config=/etc/default/kubeletconfig.json", "--topology-manager-policy=restricted"),
        ("etc/default/kubeletconfig.json", '{"topologyManagerPolicy": "none"}'),
        id="AKS",
    ),
    pytest.param(
        ("--config=/etc/kubernetes/kubelet.conf", "--config-dir=/etc/openshift/kubelet.conf.d"),
        ("etc/kubernetes/kubelet.conf", '{"topologyManagerPolicy": "restricted"}'),
        id="OpenShift",
    ),
]


@pytest.mark.parametrize(("arguments", "file"), LAYOUTS)
def test_the_kubelet_configuration_of_each_distribution_is_read(
    tree: Tree, arguments: tuple[str, ...], file: tuple[str, str]
) -> None:
    path = tree.process(300, "kubelet", *arguments) / "root" / file[0]
    path.parent.mkdir(parents=True)
    path.write_text(file[1])
    assert policy(tree) == "restricted"


def test_the_files_of_k3s_are_read_because_it_hides_its_flags(
    tree: Tree,
) -> None:
    """k3s runs the kubelet in its own process and replaces the command line with its name. The
    agent does not guess missing values.
    """
    folder = tree.process(300, "k3s", "server")
    (folder / "comm").write_text("k3s-server\n")
    shown, sources = read(tree.probe())
    assert shown == []
    assert sources["kubelet"].state == "absent"
    drop_in = folder / "root/var/lib/rancher/k3s/agent/etc/kubelet.conf.d/10.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("topologyManagerPolicy: best-effort")
    assert policy(tree) == "best-effort"


def test_the_files_of_k3s_are_in_its_data_directory(tree: Tree) -> None:
    environment = {"K3S_DATA_DIR": "/disk/k3s/data/0f5e"}
    folder = tree.process(300, "k3s", "server", environment=environment)
    drop_in = folder / "root/disk/k3s/agent/etc/kubelet.conf.d/10.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("topologyManagerPolicy: restricted")
    assert policy(tree) == "restricted"


def test_microk8s_has_the_kubelets_flags_in_a_file(tree: Tree) -> None:
    arguments = ("--kubelet-args-file=/args/kubelet", "--start-control-plane=true")
    environment = {"SNAP_DATA": "/data"}
    root = tree.process(300, "kubelite", *arguments, environment=environment) / "root"
    tree.listen("kubelet.sock", 300)
    for name in ("args", "data"):
        (root / name).mkdir()
    lines = '# --config=/none\n--fail-swap-on=false\n--config="${SNAP_DATA}/kubelet.yaml"\n'
    (root / "args/kubelet").write_text(lines)
    (root / "data/kubelet.yaml").write_text("topologyManagerPolicy: restricted")
    assert policy(tree) == "restricted"
    (root / "args/kubelet").write_text(f"{lines}\n --topology-manager-policy=best-effort")
    assert policy(tree) == "best-effort"
    (root / "args/kubelet").unlink()
    _, sources = read(tree.probe())
    assert sources["kubelet"].state == "degraded"


def kubelet(tree: Tree, *arguments: str, **files: str) -> None:
    folder = tree.process(300, "kubelet", *arguments)
    for name, text in files.items():
        path = folder / "root/etc" / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_default_topology_policy_of_the_kubelet_is_none(tree: Tree) -> None:
    kubelet(tree, "--config=/etc/k.yaml", k_yaml="kind: KubeletConfiguration")
    assert policy(tree) == "none"


def test_the_drop_in_folder_overrides_the_file_and_the_flag_overrides_both(
    tree: Tree,
) -> None:
    arguments = ["--config", "/etc/k.yaml", "--config-dir=/etc/d"]
    files = {"k_yaml": "topologyManagerPolicy: best-effort"}
    kubelet(tree, *arguments, **files)
    assert policy(tree) == "best-effort"
    shutil.rmtree(tree.root / "300")
    files |= {
        "d__10_conf": "topologyManagerPolicy: single-numa-node",
        "d__20_conf": "topologyManagerPolicy: restricted",
        "d__30_conf": "podPidsLimit: 1",
    }
    kubelet(tree, *arguments, **files)
    assert policy(tree) == "restricted"
    shutil.rmtree(tree.root / "300")
    files |= {"d__25__1_conf": "topologyManagerPolicy: best-effort"}  # in a subfolder
    kubelet(tree, *arguments, **files)
    assert policy(tree) == "best-effort"
    shutil.rmtree(tree.root / "300")
    files |= {
        "d__40_conf": "topologyManagerPolicy: null"
    }  # null removes the values of the other files.
    kubelet(tree, *arguments, **files)
    assert policy(tree) == "none"
    shutil.rmtree(tree.root / "300")
    files |= {"d__50_conf": "topologyManagerPolicy: restricted"}
    kubelet(tree, *arguments, "--topology-manager-policy=none", **files)
    assert policy(tree) == "none"


@pytest.mark.parametrize("text", ["topologyManagerPolicy: [1]", "topologyManagerPolicy: new"])
def test_an_unknown_policy_name_is_reported_as_unknown(tree: Tree, text: str) -> None:
    kubelet(tree, "--config=/etc/k.yaml", k_yaml=text)
    shown, sources = read(tree.probe())
    assert shown == []
    assert sources["kubelet"].state == "degraded"


def test_a_missing_kubelet_process_is_not_a_fault(tree: Tree) -> None:
    shown, sources = read(ConfigurationProbe(tree.root / "nowhere", tree.root / "nowhere"))
    assert shown == []
    assert {source.state for source in sources.values()} == {"absent"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--a=1", "--b", "2", "-c=3"], {"a": "1", "b": "2", "c": "3"}),
        (["--on", "--a=1"], {"on": "", "a": "1"}),
        (["--a=x", "--a=y"], {"a": "x,y"}),
        (["--a=b=c", "word"], {"a": "b=c"}),
        ([], {}),
    ],
)
def test_flags_are_parsed_as_in_go_programs(arguments: list[str], expected: dict[str, str]) -> None:
    assert parse_flags(arguments) == expected
