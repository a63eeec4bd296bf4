"""The pod of a process: every form of cgroup path, processes that end, and invisible processes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.probes.cgroup import is_static, owner
from agent.probes.processes import ProcessProbe
from agent.probes.readings import DeviceReading, ProcessReading, Reading, SourceReading

CHECK_AGAIN_S = 15.0

RECORDED = Path(__file__).parents[1] / "recorded/proc"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
HASH = "0123456789abcdef0123456789abcdef"


def uid(number: int) -> str:
    return f"{number:08x}-1111-4222-8333-{number:012x}"


def checked(probe: ProcessProbe, *pids: int) -> tuple[dict[int, ProcessReading], SourceReading]:
    device: Reading = DeviceReading("nvml", "GPU-a", 0, processes=dict.fromkeys(pids, 1))
    found = list(probe.follow([device]))
    (source,) = [r for r in found if isinstance(r, SourceReading)]
    return {r.pid: r for r in found if isinstance(r, ProcessReading)}, source


def probe(
    root: Path = RECORDED, boot_s: float = 1e6, check_again_s: float = CHECK_AGAIN_S
) -> ProcessProbe:
    return ProcessProbe(root, lambda: boot_s, check_again_s)


@pytest.mark.parametrize(
    "pid",
    [
        pytest.param(101, id="v2, systemd, containerd, burstable"),
        pytest.param(102, id="v2, systemd, CRI-O, guaranteed: no level for the quality of service"),
        pytest.param(103, id="v2, systemd, CRI-O with a level below"),
        pytest.param(104, id="v2, cgroupfs, burstable"),
        pytest.param(105, id="v2, cgroupfs, guaranteed"),
        pytest.param(106, id="v1, systemd, Docker, and an unused v2 beside it"),
        pytest.param(107, id="v1, cgroupfs"),
        pytest.param(108, id="kind: the kubelet's own slice before it"),
        pytest.param(109, id="a node in Docker"),
        pytest.param(110, id="relative to a cgroup namespace of our own"),
    ],
)
def test_every_form_of_a_cgroup_names_the_pod(pid: int) -> None:
    found, source = checked(probe(), pid)
    assert found[pid].pods == (uid(pid),)
    assert source == SourceReading("proc")


@pytest.mark.parametrize("before", ["kubepods.slice", "system.slice/containerd.service"])
def test_drivers_that_disagree_write_pod_and_container_into_one_level(before: str) -> None:
    slice_of = f"kubepods-burstable-pod{uid(7).replace('-', '_')}.slice"
    assert owner(f"0::/{before}/{slice_of}:cri-containerd:{7:064x}\n") == (uid(7),)


def test_a_static_pod_is_known_by_the_hash_of_its_manifest() -> None:
    found, _ = checked(probe(), 111)
    assert found[111].pods == (HASH,)
    assert is_static(HASH)
    assert not is_static(uid(1))


def test_a_pod_in_a_pod_has_both_the_outer_first() -> None:
    found, _ = checked(probe(), 115)
    assert found[115].pods == (uid(115), uid(116))


@pytest.mark.parametrize(
    ("pid", "command"),
    [
        pytest.param(112, "python3", id="somebody's session"),
        pytest.param(113, "nvidia-persiste", id="a service of the machine"),
        pytest.param(114, "a) S (b", id="a container without a pod, and a name that misleads"),
        pytest.param(117, "podman", id="a container of podman, whose path has pod in it"),
    ],
)
def test_a_process_of_no_pod_has_none_and_is_named(pid: int, command: str) -> None:
    found, _ = checked(probe(), pid)
    assert (found[pid].pods, found[pid].command, found[pid].known) == ((), command, True)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "nonsense", "0::", ":::", "0::/pod", "0::/kubepods/pod", f"0::/podx{uid(1)}"],
)
def test_other_cgroups_belong_to_no_pod(text: str) -> None:
    assert owner(text) == ()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(RECORDED, tmp_path / "proc")
    return tmp_path / "proc"


def test_a_process_that_ended_since_it_was_listed_was_its_last_owner_s(tree: Path) -> None:
    probing = probe(tree, check_again_s=0.0)
    checked(probing, 101)
    shutil.rmtree(tree / "101")
    found, _ = checked(probing, 101)
    assert (found[101].pods, found[101].command) == ((uid(101),), "")
    again, _ = checked(probing, 101)
    assert again[101].pods == ()  # whatever lists it for longer is no process of a pod


def test_a_process_that_is_still_listed_is_read_seldom(tree: Path) -> None:
    """Reading thousands of them takes a third of a second of CPU."""
    now_s = [1e6]
    probing = ProcessProbe(tree, lambda: now_s[0])
    checked(probing, 101)
    again = tree / "101"
    again.rename(tree / "gone")  # the id is given to another process, which has another inode
    again.mkdir()
    (again / "stat").write_text((tree / "102/stat").read_text())
    (again / "cgroup").write_text((tree / "102/cgroup").read_text())
    now_s[0] += CHECK_AGAIN_S - 0.1
    found, _ = checked(probing, 101)
    assert found[101].pods == (uid(101),)
    now_s[0] += 0.1
    found, _ = checked(probing, 101)
    assert found[101].pods == (uid(102),)


def test_the_files_of_a_pods_process_are_read_once(tree: Path) -> None:
    now_s = [1e6]
    probing = ProcessProbe(tree, lambda: now_s[0])
    before, _ = checked(probing, 101, 113)
    for pid in (101, 113):  # 113 is of no pod and may have taken another name
        (tree / f"{pid}/stat").write_text(f"{pid} (renamed) S " + "1 " * 30)
    now_s[0] += CHECK_AGAIN_S
    after, _ = checked(probing, 101, 113)
    assert after[101] == before[101]
    assert (before[113].pods, after[113].command) == ((), "renamed")


def test_an_id_that_was_given_out_again_is_not_the_newcomer_s(tree: Path) -> None:
    started_s = 101_000 / TICKS_PER_S
    found, _ = checked(probe(tree, boot_s=started_s - 1.0), 101)
    assert (found[101].pods, found[101].command) == ((), "")
    found, _ = checked(probe(tree, boot_s=started_s), 101)
    assert found[101].pods == (uid(101),)


def test_an_agent_that_sees_its_own_container_only_attributes_nothing(tree: Path) -> None:
    (tree / "2/comm").unlink()
    (tree / "self").mkdir()
    (tree / "self/cgroup").write_text((tree / "1/cgroup").read_text())
    found, source = checked(probe(tree), 101, 112)
    assert found == {}
    assert source.state == "degraded"
    assert "hostPID" in source.message


def test_the_host_s_proc_is_of_no_use_to_an_agent_in_a_namespace_of_its_own(tree: Path) -> None:
    (tree / "self").symlink_to("4711")  # the host's number for us
    found, source = checked(probe(tree), 101)
    assert found == {}
    assert "hostPID" in source.message


def test_a_node_in_a_container_is_seen_though_its_first_process_is_not_the_host_s(
    tree: Path,
) -> None:
    (tree / "2/comm").write_text("kubelet\n")
    (tree / "self").mkdir()
    (tree / "self/cgroup").write_text("0::/kubelet.slice/agent\n")
    found, source = checked(probe(tree), 108)
    assert found[108].pods == (uid(108),)
    assert source.state == "ok"


def test_a_proc_that_cannot_be_read_attributes_nothing(tmp_path: Path) -> None:
    found, source = checked(probe(tmp_path), 1)
    assert found == {}
    assert source.state == "degraded"


@pytest.mark.parametrize("text", ["", "garbage", "1 (x) S 1 2"])
def test_a_file_that_cannot_be_parsed_is_not_counted_as_unused(tree: Path, text: str) -> None:
    (tree / "101/stat").write_text(text)
    found, source = checked(probe(tree), 101, 102)
    assert (found[101].known, found[102].known) == (False, True)
    assert source.state == "degraded"


def test_process_0_is_one_that_the_driver_hides() -> None:
    found, source = checked(probe(), 0)
    assert not found[0].known
    assert source.state == "degraded"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A pod's cgroup as the kubelet makes it, where this machine lets us make one."""
    tops = ("/sys/fs/cgroup/pids", "/sys/fs/cgroup")
    top = next((Path(each) for each in tops if (Path(each) / "cgroup.procs").exists()), None)
    if top is None:
        pytest.skip("no cgroup hierarchy is mounted")
    name = f"kubepods-{os.getpid()}"
    folder = top / name / f"pod{uid(7)}" / f"{7:064x}"
    try:
        folder.mkdir(parents=True)
    except OSError as err:
        pytest.skip(f"cgroups may not be made here: {err}")
    yield folder
    for each in (folder, folder.parent, folder.parent.parent):
        each.rmdir()


def test_a_real_process_in_a_real_cgroup_is_its_pod_s(cgroup: Path) -> None:
    real = ProcessProbe(Path("/proc"))
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        found, source = checked(real, process.pid, os.getpid())
        assert process.stdin is not None
        process.stdin.close()
    assert found[process.pid].pods == (uid(7),)
    assert found[os.getpid()].pods == ()
    assert source.state == "ok"
