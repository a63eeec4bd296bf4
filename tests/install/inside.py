"""Moves a forked process into the namespaces and file system of a container, with its user and
capabilities.

This module imports little, because each forked process imports it.
"""

import ctypes
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

#: A script that mounts the container's file system and runs a command in it. Its arguments are a
#: folder for the container, whether the file system is writable, the number of mounts, the source,
#: target and kind of each mount, and the command. The kinds are ro, rw and open. The kind open
#: mounts nothing, but lets all users enter the target.
INSIDE = """
set -e
base=$1 writable=$2 mounts=$3
shift 3
mkdir -p "$base"
mount -t tmpfs tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
mount -t tmpfs tmpfs "$base/root/run"
while [ "$mounts" -gt 0 ]; do
  target=$base/root$2
  if [ "$3" = open ]; then
    chmod a+x "$target"
    mounts=$((mounts - 1))
    shift 3
    continue
  fi
  if [ -d "$1" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; touch "$target"; fi
  mount --rbind "$1" "$target"
  if [ "$3" = ro ]; then mount -o remount,bind,ro "$target"; fi
  mounts=$((mounts - 1))
  shift 3
done
for each in dev proc sys; do mount --rbind "/$each" "$base/root/$each"; done
if [ "$writable" = no ]; then mount -o remount,ro "$base/root"; fi
exec chroot "$base/root" "$@"
"""
# Constants from linux/sched.h, linux/mount.h and linux/prctl.h.
_NEWNS, _PRIVATE_AND_BELOW = 0x20000, 0x44000
_PDEATHSIG, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 24, 38
_SIGKILL = 9


@dataclass(frozen=True, slots=True)
class Confinement:
    """Confines the calling process like a container whose user is not root.

    The container gets the network of process ``network`` and the mounts of process ``mounts_of``.
    ``layout`` are the arguments of ``INSIDE``.
    """

    network: int
    mounts_of: int
    layout: Sequence[str]
    user: int
    group: int
    groups: Sequence[int]
    no_new_privs: bool

    def __call__(self) -> None:
        with (
            open(f"/proc/{self.network}/ns/net") as net,
            open(f"/proc/{self.mounts_of}/ns/mnt") as mnt,
        ):
            _call("setns", net.fileno(), 0)
            _call("setns", mnt.fileno(), 0)
        _call("unshare", _NEWNS)
        _call("mount", b"none", b"/", None, _PRIVATE_AND_BELOW, None)
        subprocess.run(["sh", "-c", INSIDE, "sh", *self.layout, "true"], check=True)
        os.chroot(f"{self.layout[0]}/root")
        os.chdir("/")
        with open("/proc/sys/kernel/cap_last_cap") as last:
            for capability in range(int(last.read()) + 1):
                _call("prctl", _CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups(self.groups)
        os.setresgid(self.group, self.group, self.group)
        os.setresuid(self.user, self.user, self.user)
        if self.no_new_privs:
            _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("prctl", _PDEATHSIG, _SIGKILL, 0, 0, 0)  # Set last, because setresuid resets it.


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
