"""Runs a command with the capabilities of the agent's container, which has only SYS_PTRACE.

    python -m benchmarks.gpu.confined COMMAND...

It does what ``drop: [ALL]``, ``add: [SYS_PTRACE]`` and ``allowPrivilegeEscalation: false`` do in
deploy/base/agent.yaml, without setpriv or capsh.
"""

import ctypes
import os
import sys
from typing import NoReturn

_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 23, 24, 38, 47
_CLEAR_ALL = 4
_SYS_PTRACE = 19
_VERSION_3 = 0x20080522


def main(argv: list[str]) -> NoReturn:
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        has = libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1
        if has and number != _SYS_PTRACE and libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            why = os.strerror(ctypes.get_errno())
            raise SystemExit(f"capability {number} cannot be dropped: {why}")
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    sets[2] = sets[5] = 0  # the inheritable set, which exec would add
    libc.capset(header, sets)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
