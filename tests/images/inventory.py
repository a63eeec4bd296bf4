"""Prints the contents of an image as JSON. Tests run it in a container of the image.

python -c TEXT PROGRAM...
"""

import importlib.metadata
import json
import os
import re
import shutil
import sys

ENVIRONMENT = "/opt/headroom"


def main() -> None:
    (site,) = (each for each in sys.path if each.startswith(ENVIRONMENT))
    files = [f"{folder}/{name}" for folder, _, names in os.walk(ENVIRONMENT) for name in names]
    own = [each for each in files if re.match(f"{site}/(agent|contract|extender|headroom)/", each)]
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
        "not compiled": [each for each in sources if each.removesuffix(".py") not in compiled],
        "programs": [each for each in sys.argv[1:] if shutil.which(each)],
        "root": sorted(os.listdir("/")),
        "writable": [e for e in files if os.access(e, os.W_OK) and not os.path.islink(e)],
        "owners": sorted({each.st_uid for each in status}),
        "bytes": sum(each.st_size for each in status),
    }
    sys.stdout.write(json.dumps(found))


main()
