"""Tests that files of other processes are read, and that links stay inside the root of the
process.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.probes.files_inside import Unreadable, files_below, read_inside
from tests.agent.host import Tree, plugin, policy, read
from tests.waiting import until

_CONFIG = (
    "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
)
_MOST_BYTES = 1 << 16


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """Return the /proc directory of a process. There is a secret outside the root of the
    process.
    """
    folder = tmp_path / "7"
    (folder / "root/config").mkdir(parents=True)
    (folder / "cwd").symlink_to("root/config")
    (tmp_path / "secret").write_text("secret")
    (folder / "secret").write_text("secret")
    return folder


def _text(process: Path, path: str = "/config/config.yaml") -> str:
    return read_inside(process, path, _MOST_BYTES)[1].decode()


@pytest.mark.parametrize(
    "target",
    [
        "/data/real",
        "//data/./real",
        "../data/real",
        "../../../../../data/real",
        "/../../data/real",
        "/loop/../data/real",
        "/moved/real",
        "/moved/../data/real",
    ],
)
def test_a_link_is_followed_inside_the_root_of_the_process(process: Path, target: str) -> None:
    root = process / "root"
    (root / "data").mkdir()
    (root / "data/real").write_text("inside")
    (root / "loop").symlink_to("/config")
    (root / "moved").symlink_to("/data")
    (root / "config/config.yaml").symlink_to(target)
    assert _text(process) == "inside"
    if target.startswith("/"):
        assert _text(process, "config.yaml") == "inside"


@pytest.mark.parametrize(
    "target",
    [
        "/secret",
        "../secret",
        "../../secret",
        "../../../../secret",
        "/../../secret",
        "{outside}",
        "/self/root/secret",
        "/self/cwd/../secret",
    ],
)
def test_no_link_leads_outside_the_root_of_the_process(
    process: Path, tmp_path: Path, target: str
) -> None:
    root = process / "root"
    (root / "self").symlink_to("/proc/self")
    (root / "config/config.yaml").symlink_to(target.format(outside=tmp_path / "secret"))
    with pytest.raises(Unreadable, match="which is missing"):
        _text(process)


def test_a_path_does_not_lead_outside_the_working_directory(process: Path) -> None:
    with pytest.raises(Unreadable, match="leads out of the working directory"):
        _text(process, "../../secret")


def test_magic_links_of_the_kernel_are_not_followed(process: Path) -> None:
    """In a container's /proc, magic links lead to files outside the container's root."""
    root = process / "root"
    with (process / "secret").open() as held, _mounted(Path("/proc"), root / "proc"):
        (root / "config/config.yaml").symlink_to(f"/proc/{os.getpid()}/fd/{held.fileno()}")
        with pytest.raises(Unreadable):
            _text(process)
        (root / "config/config.yaml").unlink()
        (root / "config/config.yaml").symlink_to(f"/proc/{os.getpid()}/cwd/pyproject.toml")
        with pytest.raises(Unreadable):
            _text(process)


@contextmanager
def _mounted(path: Path, there: Path) -> Iterator[None]:
    there.mkdir()
    subprocess.run(["mount", "--bind", str(path), str(there)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(there)], check=True)


def test_a_directory_replaced_during_the_read_leads_nowhere_else(
    process: Path, tmp_path: Path
) -> None:
    """A tenant replaces a directory with a link to an outside directory and back while the agent
    reads.
    """
    root = process / "root"
    outside = tmp_path / "outside"
    for folder, text in ((root / "a/b", "inside"), (outside / "b", "secret")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(text)
    (tmp_path / "file").write_text("secret")
    (process / "file").write_text("secret")
    (root / "file").write_text("inside")
    (root / "config/config.yaml").symlink_to("/a/b/../../file")
    end = threading.Event()

    def exchange() -> None:
        while not end.is_set():
            (root / "a/b").rename(tmp_path / "b")
            (root / "a/b").symlink_to(outside)
            (root / "a/b").unlink()
            (tmp_path / "b").rename(root / "a/b")

    thread = threading.Thread(target=exchange)
    thread.start()
    found: set[str] = set()

    def read_times(times: int) -> None:
        for _ in range(times):
            try:
                found.add(_text(process))
            except Unreadable:
                found.add("unreadable")

    try:
        read_times(2000)
        # Retry, because on a busy machine many reads can occur in the middle of a swap.
        until(
            lambda: read_times(100) or "inside" in found, "the file is read between two exchanges"
        )
    finally:
        end.set()
        thread.join()
    assert "secret" not in found


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _disk(path: Path) -> None:
    os.mknod(path, 0o60600, os.makedev(7, 200))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_pipe, "/config/config.yaml is not a regular file"),
        (_disk, "/config/config.yaml is not a regular file"),
        (Path.mkdir, "/config/config.yaml is not a regular file"),
        (lambda path: None, "/config/config.yaml: No such file or directory"),
        (lambda path: path.symlink_to("/a\nb"), "leads to /a\\nb, which is missing"),
        (lambda path: path.symlink_to("config.yaml"), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("config.yaml/x"), "Too many levels of symbolic links"),
        (lambda path: (path.parent / "f").touch() or path.symlink_to("f/x"), "Not a directory"),
    ],
    ids=["pipe", "disk", "directory", "nothing", "dangling", "circle", "longer", "in a file"],
)
def test_the_reason_describes_the_error(
    process: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(process / "root/config/config.yaml")
    with pytest.raises(Unreadable) as raised:
        _text(process)
    assert reason in str(raised.value)


def test_reading_a_deep_path_uses_few_descriptors(process: Path) -> None:
    folder = process / "root/config"
    for _ in range(70):
        folder = folder / "d"
    folder.mkdir(parents=True)
    with pytest.raises(Unreadable, match="too many levels"):
        _text(process, "/config" + "/d" * 70)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(Unreadable):
            _text(process, "/config" + "/d" * 70)
    assert len(os.listdir("/proc/self/fd")) == before


def test_dev_null_is_an_empty_file(process: Path) -> None:
    (process / "root/dev").mkdir()
    os.mknod(process / "root/dev/null", 0o20666, os.makedev(1, 3))
    (process / "root/config/config.yaml").symlink_to("/dev/null")
    assert _text(process) == ""


def test_files_in_a_directory_are_found_through_links(process: Path) -> None:
    for name in ("c", "b/2", "b/1", "a"):
        file = process / "root/data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (process / "root/data/b/up").symlink_to("..")
    (process / "root/conf.d").symlink_to("/data")
    found = [f"/conf.d/{name}" for name in ("a", "b/1", "b/2", "b/up", "c")]
    assert list(files_below(process, "/conf.d")) == found
    assert list(files_below(process, "/none")) == []


def test_the_links_of_nvidias_config_manager_are_followed(tmp_path: Path) -> None:
    """The config manager replaces the file with a link to the chosen configuration, or to /dev/null
    if there is none.
    """
    tree = Tree(tmp_path / "proc")
    root = tree.plugin() / "root"
    file = root / "config/config.yaml"
    (root / "available-configs/..data").mkdir(parents=True)
    (root / "available-configs/sliced").symlink_to("..data/sliced")
    (root / "dev").mkdir()
    os.mknod(root / "dev/null", 0o20666, os.makedev(1, 3))
    file.unlink()
    file.symlink_to("/available-configs/sliced")
    shown, sources = read(tree.probe())
    assert shown == []
    assert "leads to /available-configs/sliced, which is missing" in sources["plugin"].message
    (root / "available-configs/..data/sliced").write_text(_CONFIG)
    assert plugin(tree).replicas == {"nvidia.com/gpu": 4}
    file.unlink()
    file.symlink_to("/dev/null")
    assert (plugin(tree).sharing, plugin(tree).replicas) == ("none", {})


def test_the_folder_of_a_kubelet_may_be_elsewhere(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "proc")
    root = tree.process(300, "kubelet", "--config=/var/lib/kubelet/config.yaml") / "root"
    (root / "data/kubelet").mkdir(parents=True)
    (root / "var/lib").mkdir(parents=True)
    (root / "var/lib/kubelet").symlink_to("/data/kubelet")
    (root / "data/kubelet/config.yaml").write_text("topologyManagerPolicy: restricted\n")
    assert policy(tree) == "restricted"


def test_a_process_with_another_root_is_read_in_its_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "config").mkdir(parents=True)
    (root / "config/config.yaml").symlink_to("/chosen")
    (root / "chosen").write_text("inside")
    code = "import os, sys; os.chroot(sys.argv[1]); os.chdir('/'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        there = Path(f"/proc/{child.pid}")
        assert _text(there) == _text(there, "config/config.yaml") == "inside"
