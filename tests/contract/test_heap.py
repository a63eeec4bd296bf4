"""Tests how much freed memory the C library keeps, according to its own statistics."""

import subprocess
import sys

import pytest

#: A program that prints the number of arenas and the number of large blocks that have their own
#: mapping.
PROGRAM = """
import ctypes, os, tempfile, threading
from headroom.system.malloc import keep_small

libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    raise SystemExit("not glibc")
if {bounded}:
    keep_small(64 << 10, 128 << 10)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(8)

def allocate():
    block = bytearray(4000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
del threads
large = bytearray(8 << 20)
del large  # by default, blocks of up to this size are no longer mapped by themselves
kept = [libc.malloc(1 << 20) for _ in range(3)]
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    text = file.read().decode()
mapped = text.partition('type="mmap" count="')[2].partition('"')[0]
print(text.count("<heap nr="), mapped)
"""


@pytest.mark.parametrize("bounded", [True, False], ids=["kept small", "by default"])
def test_threads_share_one_arena_and_large_blocks_are_returned(bounded: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(bounded=bounded)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "not glibc" in done.stderr:
        pytest.skip("only glibc has arenas")
    arenas, mapped = map(int, done.stdout.split())
    assert (arenas == 1, mapped >= 3) == (bounded, bounded), done.stdout
