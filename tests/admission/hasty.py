"""``headroom webhook`` that looks for a missing kind once a second instead of once a minute:
python -m tests.admission.hasty webhook --config FILE"""

import asyncio
import sys
from pathlib import Path

from extender.app.webhook import serve_webhook
from extender.config.loading import load_settings
from extender.kube.reflector import Pace

if __name__ == "__main__":
    settings = load_settings(Path(sys.argv[3]))
    asyncio.run(serve_webhook(settings, print, Pace(absent_s=1.0)))
