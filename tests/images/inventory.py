"""Prints the contents of an image as JSON. Tests run this program in a container of the image.

python -c TEXT
"""

import importlib.metadata
import json
import os
import re
import sys

ENVIRONMENT = "/opt/headroom"
#: Folders that contain programs.
FOLDERS = (
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"),
    f"{ENVIRONMENT}/bin",
)


def _room(source: str) -> str:
    """Return the package of a source file, such as ``agent`` or ``headroom.contract``."""
    first, second, *rest = source.split("/")
    return f"{first}.{second}" if first == "headroom" and rest else first


def main() -> None:
    (site,) = (each for each in sys.path if each.startswith(ENVIRONMENT))
    files = [f"{folder}/{name}" for folder, _, names in os.walk(ENVIRONMENT) for name in names]
    own = [each for each in files if re.match(f"{site}/(agent|extender|headroom)/", each)]
    sources = [each for each in own if each.endswith(".py")]
    compiled = {each.replace("__pycache__/", "").partition(".cpython")[0] for each in own}
    status = [os.lstat(each) for each in files]
    found = {
        "user": [os.getuid(), os.getgid()],
        "python": sys.version.split()[0],
        "packages": {
            re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
            for each in importlib.metadata.distributions(path=[site])
        },
        "sources": len(sources),
        "rooms": sorted({_room(each.removeprefix(f"{site}/")) for each in sources}),
        "not compiled": [each for each in sources if each.removesuffix(".py") not in compiled],
        "programs": sorted(
            f"{folder}/{name}"
            for folder in FOLDERS
            if os.path.isdir(folder)
            for name in os.listdir(folder)
        ),
        "root": sorted(os.listdir("/")),
        "writable": [e for e in files if os.access(e, os.W_OK) and not os.path.islink(e)],
        "owners": sorted({each.st_uid for each in status}),
        "bytes": sum(each.st_size for each in status),
    }
    sys.stdout.write(json.dumps(found))


main()
