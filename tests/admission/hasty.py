"""``headroom webhook`` that looks for a missing kind once a second instead of once a minute:

python -m tests.admission.hasty webhook --config FILE
"""

import asyncio
import sys
from pathlib import Path

from headroom.runtime.kube.reflector import Pace
from headroom.runtime.settings.loading import load_settings
from headroom.webhook.process import serve_webhook

if __name__ == "__main__":
    settings = load_settings(Path(sys.argv[3]))
    asyncio.run(serve_webhook(settings, print, Pace(absent_s=1.0)))
