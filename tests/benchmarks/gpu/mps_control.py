"""The MPS control daemon of the stand-in.

With -f it runs until another client writes "quit". The default memory limit is written to a file,
which the stand-in for libcuda reads.
"""

import os
import sys
import time
from pathlib import Path

folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    (folder / "control").touch()
    while not (folder / "quit").exists():
        time.sleep(0.05)
else:
    command, *words = sys.stdin.read().split()
    if command == "quit":
        (folder / "quit").touch()
    elif command == "set_default_device_pinned_mem_limit":
        (folder / "limit").write_text(words[1])
