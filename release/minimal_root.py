"""Copies what Headroom needs from a base image into an empty folder: no shell, no package manager.

    python3 minimal_root.py TARGET ENVIRONMENT

The Dockerfile runs it while it builds an image. TARGET becomes the root of the image, and
ENVIRONMENT is the virtual environment that is added to it later. It copies the interpreter, its
standard library without tests, pip, Tk and static libraries, and the shared libraries that the
interpreter, the standard library and ENVIRONMENT load. It also writes the metadata of the Debian
packages of copied files into /var/lib/dpkg/status.d, as distroless images do, because scanners look
for known vulnerabilities there.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Parts of the standard library that no process of Headroom imports.
LEFT_OUT = frozenset(
    {"dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
    | {"test", "tests", "tkinter", "turtledemo"}
)
#: Files and folders, mostly of /etc, that Python, OpenSSL, glibc, the NVIDIA container toolkit
#: (debian_version, ld.so.*) or scanners read. Files that do not exist are left out.
READ = (
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/os-release", "/etc/debian_version"),
    *(
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/etc/ssl/certs",
        "/etc/ssl/openssl.cnf",
        "/usr/lib/ssl",
        "/usr/share/ca-certificates",
    ),
    *("/etc/localtime", "/usr/share/zoneinfo/UTC", "/usr/share/zoneinfo/Etc/UTC"),
)
#: Libraries that glibc loads by name.
LOADED = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")
DPKG = Path("/var/lib/dpkg")


def interpreter() -> Iterator[Path]:
    """Yield the interpreter and each symbolic link that leads to it."""
    path = Path(sys.executable)
    yield path
    while path.is_symlink():
        path = path.parent / path.readlink()
        yield path


def standard_library() -> Iterator[Path]:
    for folder in {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}:
        for parent, folders, names in os.walk(folder):
            folders[:] = [
                name for name in folders if name not in LEFT_OUT and not name.startswith("config-")
            ]
            yield from (Path(parent, name) for name in names)


def libraries(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the shared libraries that programs and libraries load, as ldd names them."""
    named = [str(each) for each in files]
    shown = subprocess.run(["ldd", *named], capture_output=True, text=True, check=False).stdout
    found = {Path(each) for each in re.findall(r"(?:=> |^\t)(/\S+)", shown, re.MULTILINE)}
    folders = {each.parent for each in found}
    found |= {folder / name for folder in folders for name in LOADED if (folder / name).exists()}
    yield from found


def all_of(path: Path) -> Iterator[Path]:
    """Yield a file, or all files of a folder."""
    if path.is_dir() and not path.is_symlink():
        for parent, _, names in os.walk(path):
            yield from (Path(parent, name) for name in names)
    elif path.exists():
        yield path


def add(target: Path, path: Path) -> Path:
    """Copy a file, a link or an empty folder, and each link of the folders that lead to it.

    Return the file's real path.
    """
    real = path.parent.resolve() / path.name
    for parent in reversed(path.parents):
        if parent.is_symlink() and not (target / parent.relative_to("/")).is_symlink():
            copied = target / parent.resolve().relative_to("/")
            copied.mkdir(parents=True, exist_ok=True)
            link = target / parent.relative_to("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(parent.readlink())
    copied = target / real.relative_to("/")
    copied.parent.mkdir(parents=True, exist_ok=True)
    if not copied.is_symlink() and not copied.exists():
        shutil.copy2(real, copied, follow_symlinks=False)
    if real.is_symlink() and real.exists():
        add(target, real.parent / real.readlink())
    return real


def note_packages(target: Path, files: set[Path]) -> None:
    """Write the metadata of the Debian packages of the files, if the base image has any."""
    status = DPKG / "status"
    if not status.exists():
        return
    paragraphs = {
        re.findall(r"^Package: (\S+)", text, re.MULTILINE)[0]: text
        for text in status.read_text().split("\n\n")
        if text.strip()
    }
    real = {str(each.resolve()) for each in files} | {str(each) for each in files}
    folder = target / "var/lib/dpkg/status.d"
    folder.mkdir(parents=True)
    for listed in sorted((DPKG / "info").glob("*.list")):
        name = listed.stem.partition(":")[0]
        own = listed.read_text().splitlines()
        # Debian's lists name /lib, which is a link to /usr/lib.
        if name in paragraphs and any(each in real or f"/usr{each}" in real for each in own):
            (folder / name).write_text(f"{paragraphs[name].strip()}\n")


def main(target: Path, environment: Path) -> None:
    os.umask(0o022)
    files = {*interpreter(), *standard_library()}
    native = [each for each in files if ".so" in each.suffixes]
    native += [each for each in environment.rglob("*.so*") if each.is_file()]
    loaded = libraries([Path(sys.executable).resolve(), *native])
    files |= {each for each in loaded if not each.is_relative_to(environment)}
    for path in READ:
        files |= set(all_of(Path(path)))
    added = {add(target, each) for each in sorted(files) if each.exists()}
    (target / "tmp").mkdir(parents=True)
    (target / "tmp").chmod(0o1777)
    note_packages(target, added)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
