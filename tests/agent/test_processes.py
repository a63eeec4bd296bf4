"""Tests that the pod of a process is found for every form of cgroup path, for ended processes, and
for invisible processes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.probes.cgroup import is_static, owner
from agent.probes.processes import ProcessProbe, container_name
from agent.probes.readings import Container, DeviceReading, ProcessReading, Reading, SourceReading
from tests.agent.attributed import gpu, holding, shown, uses

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
        pytest.param(106, id="v1, systemd, Docker, with an unused v2 hierarchy"),
        pytest.param(107, id="v1, cgroupfs"),
        pytest.param(108, id="kind: the kubelet's own slice before it"),
        pytest.param(109, id="a node in Docker"),
        pytest.param(110, id="relative to the agent's own cgroup namespace"),
    ],
)
def test_every_form_of_a_cgroup_path_contains_the_pod(pid: int) -> None:
    found, source = checked(probe(), pid)
    assert found[pid].pod == uid(pid)
    assert source == SourceReading("proc")


@pytest.mark.parametrize("before", ["kubepods.slice", "system.slice/containerd.service"])
def test_some_cgroup_drivers_write_pod_and_container_into_one_level(before: str) -> None:
    slice_of = f"kubepods-burstable-pod{uid(7).replace('-', '_')}.slice"
    assert owner(f"0::/{before}/{slice_of}:cri-containerd:{7:064x}\n") == (uid(7), f"{7:064x}")


def test_a_static_pod_is_identified_by_the_hash_of_its_manifest() -> None:
    found, _ = checked(probe(), 111)
    assert found[111].pod == HASH
    assert is_static(HASH)
    assert not is_static(uid(1))


def test_a_cgroup_created_inside_a_container_belongs_to_the_containers_pod() -> None:
    """A pod that requests no GPU creates a cgroup with the name of a pod that holds a GPU."""
    found, _ = checked(probe(), 115)
    victim = holding(uid(116))
    charged = shown(gpu(processes={115: 9}), holdings=(victim,), processes=found.values())
    assert uses(charged) == [(uid(115), "A", "", 9), (uid(116), "A", "A::0", 0)]


def test_on_a_node_in_a_pod_only_pods_of_its_own_kubelet_count(tree: Path) -> None:
    (tree / "2/comm").write_text("kubelet\n")
    (tree / "1/cgroup").write_text(f"0::/kubepods/pod{uid(115)}/{8:064x}/init\n")
    found, _ = checked(probe(tree), 115, 101, 112)
    assert found[115].pod == uid(116)
    assert found[115].container.id == f"{115:064x}"
    assert (found[101].pod, found[112].pod) == (uid(101), "")


@pytest.mark.parametrize(
    ("pid", "command"),
    [
        pytest.param(112, "python3", id="a user session"),
        pytest.param(113, "nvidia-persiste", id="a system service"),
        pytest.param(114, "a) S (b", id="a container without a pod and a misleading name"),
        pytest.param(117, "podman", id="a container of podman, whose path contains pod"),
    ],
)
def test_a_process_without_a_pod_is_reported_by_its_name(pid: int, command: str) -> None:
    found, _ = checked(probe(), pid)
    assert (found[pid].pod, found[pid].command, found[pid].known) == ("", command, True)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "nonsense", "0::", ":::", "0::/pod", "0::/kubepods/pod", f"0::/podx{uid(1)}"],
)
def test_other_cgroups_belong_to_no_pod(text: str) -> None:
    assert owner(text) == ("", "")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(RECORDED, tmp_path / "proc")
    return tmp_path / "proc"


def test_a_process_that_ended_since_it_was_listed_belongs_to_its_last_owner(tree: Path) -> None:
    probing = probe(tree, check_again_s=0.0)
    checked(probing, 101)
    shutil.rmtree(tree / "101")
    found, _ = checked(probing, 101)
    assert (found[101].pod, found[101].command) == (uid(101), "")
    # The process no longer counts for the pod, because the driver still lists it in the next
    # sample.
    again, _ = checked(probing, 101)
    assert again[101].pod == ""


def test_a_process_that_is_still_listed_is_read_rarely(tree: Path) -> None:
    """Processes are read rarely, because reading thousands of processes takes a third of a second
    of CPU.
    """
    now_s = [1e6]
    probing = ProcessProbe(tree, lambda: now_s[0])
    checked(probing, 101)
    again = tree / "101"
    again.rename(tree / "gone")  # Another process gets the ID, with another inode.
    again.mkdir()
    (again / "stat").write_text((tree / "102/stat").read_text())
    (again / "cgroup").write_text((tree / "102/cgroup").read_text())
    now_s[0] += CHECK_AGAIN_S - 0.1
    found, _ = checked(probing, 101)
    assert found[101].pod == uid(101)
    now_s[0] += 0.1
    found, _ = checked(probing, 101)
    assert found[101].pod == uid(102)


def test_the_files_of_a_pods_process_are_read_once(tree: Path) -> None:
    now_s = [1e6]
    probing = ProcessProbe(tree, lambda: now_s[0])
    before, _ = checked(probing, 101, 113)
    for pid in (101, 113):  # 113 is in no pod and may have changed its name.
        (tree / f"{pid}/stat").write_text(f"{pid} (renamed) S " + "1 " * 30)
    now_s[0] += CHECK_AGAIN_S
    after, _ = checked(probing, 101, 113)
    assert after[101] == before[101]
    assert (before[113].pod, after[113].command) == ("", "renamed")


def test_a_reused_process_id_does_not_belong_to_the_previous_owner(tree: Path) -> None:
    started_s = 101_000 / TICKS_PER_S
    found, _ = checked(probe(tree, boot_s=started_s - 1.0), 101)
    assert (found[101].pod, found[101].command) == ("", "")
    found, _ = checked(probe(tree, boot_s=started_s), 101)
    assert found[101].pod == uid(101)


def test_an_agent_that_sees_only_its_own_container_attributes_nothing(tree: Path) -> None:
    (tree / "2/comm").unlink()
    (tree / "self").mkdir()
    (tree / "self/cgroup").write_text((tree / "1/cgroup").read_text())
    found, source = checked(probe(tree), 101, 112)
    assert found == {}
    assert source.state == "degraded"
    assert "hostPID" in source.message


def test_the_hosts_proc_is_not_used_by_an_agent_in_its_own_pid_namespace(tree: Path) -> None:
    (tree / "self").symlink_to("4711")  # the agent's pid on the host
    found, source = checked(probe(tree), 101)
    assert found == {}
    assert "hostPID" in source.message


def test_a_node_in_a_container_is_seen_although_its_first_process_is_not_the_hosts(
    tree: Path,
) -> None:
    (tree / "2/comm").write_text("kubelet\n")
    (tree / "self").mkdir()
    (tree / "self/cgroup").write_text("0::/kubelet.slice/agent\n")
    found, source = checked(probe(tree), 108)
    assert found[108].pod == uid(108)
    assert source.state == "ok"


def test_an_unreadable_proc_attributes_nothing(tmp_path: Path) -> None:
    found, source = checked(probe(tmp_path), 1)
    assert found == {}
    assert source.state == "degraded"


@pytest.mark.parametrize("text", ["", "garbage", "1 (x) S 1 2"])
def test_an_unparsable_file_does_not_count_as_unused(tree: Path, text: str) -> None:
    (tree / "101/stat").write_text(text)
    found, source = checked(probe(tree), 101, 102)
    assert (found[101].known, found[102].known) == (False, True)
    assert source.state == "degraded"


def test_process_0_stands_for_a_process_that_the_driver_hides() -> None:
    found, source = checked(probe(), 0)
    assert not found[0].known
    assert source.state == "degraded"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A pod's cgroup as the kubelet would create it. The test is skipped if this machine does not
    permit it.
    """
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


def test_a_real_process_in_a_real_cgroup_belongs_to_its_pod(cgroup: Path) -> None:
    real = ProcessProbe(Path("/proc"))
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        found, source = checked(real, process.pid, os.getpid())
        assert process.stdin is not None
        process.stdin.close()
    assert found[process.pid].pod == uid(7)
    assert found[os.getpid()].pod == ""
    assert source.state == "ok"


CONTAINER = f"{0x101:064x}"
CGROUP = (
    f"0::/kubepods.slice/kubepods-pod{uid(7).replace('-', '_')}.slice/"
    "cri-containerd-{container}.scope\n"
)
#: The line in mountinfo for the container's termination log.
MOUNT = (
    "812 790 8:1 /var/lib/kubelet/pods/{uid}/containers/{name}/3f2a91c4 /dev/termination-log"
    " rw,relatime - ext4 /dev/sda1 rw\n"
)


def started(
    root: Path, pid: int, parent: int, start_s: int, mounts: str = "", container: str = CONTAINER
) -> None:
    """Add a process of a container to /proc."""
    folder = root / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(CGROUP.format(container=container) if container else "0::/\n")
    ticks = start_s * TICKS_PER_S
    (folder / "stat").write_text(f"{pid} (python) S {parent} " + "1 " * 17 + f"{ticks} 1 1\n")
    (folder / "mountinfo").write_text(mounts)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The host's /proc. The shim of the container is process 50 and runs outside the container."""
    started(tmp_path, 2, 0, 1, container="")
    (tmp_path / "2/comm").write_text("kthreadd\n")
    started(tmp_path, 50, 1, 100, container="")
    return tmp_path


def test_a_containers_name_comes_from_its_mounts_and_its_start_from_its_first_process(
    host: Path,
) -> None:
    other = "30 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    started(host, 60, 50, 200)  # the container's entrypoint
    started(host, 61, 60, 210)
    started(host, 62, 61, 300, other + MOUNT.format(uid=uid(7), name="main"))
    found, _ = checked(probe(host), 62)
    assert found[62].pod == uid(7)
    assert found[62].container == Container(CONTAINER, "main", 200.0)


def test_processes_of_a_container_have_the_start_of_its_oldest_process(host: Path) -> None:
    """A process that ``kubectl exec`` starts has no parent process in the container."""
    started(host, 60, 50, 200, MOUNT.format(uid=uid(7), name="main"))
    started(host, 55, 50, 300, MOUNT.format(uid=uid(7), name="main"))
    found, _ = checked(probe(host), 55, 60)
    assert found[55].container == Container(CONTAINER, "main", 300.0)
    assert found[60].container == Container(CONTAINER, "main", 200.0)
    probing = probe(host, check_again_s=0.0)
    assert checked(probing, 60)[0][60].container.started_s == 200.0
    assert checked(probing, 55, 60)[0][55].container.started_s == 200.0


@pytest.mark.parametrize(
    "mounts",
    [
        pytest.param("", id="no mounts"),
        pytest.param(MOUNT.format(uid=uid(8), name="main"), id="mounts of another pod"),
        pytest.param("1 2 3\n\n4", id="invalid lines"),
        pytest.param(
            f"1 2 8:1 /pods/{uid(7)}/containers/main/x/y /mnt rw - ext4 a rw\n", id="another path"
        ),
    ],
)
def test_a_container_whose_mounts_do_not_contain_its_name_has_no_name(
    host: Path, mounts: str
) -> None:
    started(host, 60, 50, 200, mounts)
    found, _ = checked(probe(host), 60)
    assert found[60].container == Container(CONTAINER, "", 200.0)


def test_a_process_with_unreadable_mounts_is_attributed_without_the_containers_name(
    host: Path,
) -> None:
    started(host, 60, 50, 200)
    (host / "60/mountinfo").unlink()
    found, source = checked(probe(host), 60)
    assert (found[60].known, found[60].container.name) == (True, "")
    assert source == SourceReading("proc")


def test_ancestors_are_read_up_to_a_limit_and_never_in_a_cycle(host: Path) -> None:
    started(host, 60, 61, 300)
    started(host, 61, 60, 200)
    found, _ = checked(probe(host), 60)
    assert found[60].container.started_s == 200.0


def test_a_cgroup_without_a_container_level_has_no_container_id(host: Path) -> None:
    started(host, 60, 50, 200)
    (host / "60/cgroup").write_text(f"0::/kubepods/pod{uid(7)}/nested\n")
    found, _ = checked(probe(host), 60)
    assert found[60].container == Container("")


def test_a_container_in_a_container_counts_as_the_outer_one() -> None:
    inner, outer = f"{1:064x}", f"{2:064x}"
    text = f"0::/kubepods/pod{uid(1)}/{outer}/kubelet/kubepods/pod{uid(2)}/{inner}\n"
    assert owner(text) == (uid(1), outer)
    assert owner(text, (uid(1),)) == (uid(2), inner)
    assert owner(text, (uid(2),)) == (uid(1), outer)


def test_a_process_that_ended_keeps_its_container(host: Path) -> None:
    started(host, 60, 50, 200, MOUNT.format(uid=uid(7), name="main"))
    probing = probe(host, check_again_s=0.0)
    checked(probing, 60)
    shutil.rmtree(host / "60")
    found, _ = checked(probing, 60)
    assert found[60].container == Container(CONTAINER, "main", 200.0)


def test_the_mounts_of_a_real_process_are_parsed() -> None:
    """The test process is not in a container of a kubelet."""
    with open("/proc/self/mountinfo") as file:
        assert all(len(line.split(" ")) >= 10 for line in file)
    folder = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert container_name(folder, uid(7)) == ""
    finally:
        os.close(folder)
