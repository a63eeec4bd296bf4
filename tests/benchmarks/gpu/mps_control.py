"""The MPS control daemon of the stand-in: -f runs until a client writes "quit" to another one."""

import os
import sys
import time
from pathlib import Path

folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    (folder / "control").touch()
    while not (folder / "quit").exists():
        time.sleep(0.05)
elif sys.stdin.read().strip() == "quit":
    (folder / "quit").touch()
