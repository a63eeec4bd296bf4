"""Stands in for the MPS control daemon.

With -f, it runs until another client sends "quit". It writes the default memory limit to a file,
which the fake libcuda reads.
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
