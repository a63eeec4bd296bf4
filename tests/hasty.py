"""Runs Headroom's programs with shorter intervals than the settings allow, so that tests are quick.

python -m tests.hasty serve --config FILE --host HOST --debug-open --verbs-port PORT
--debug-port PORT, tests.hasty webhook --config FILE, and tests.hasty recorder
"""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from headroom.recorder import process as recorder
from headroom.recorder import profile_book
from headroom.runtime.kube.reflector import Pace
from headroom.runtime.settings.loading import load_settings
from headroom.runtime.settings.settings import Settings
from headroom.serve.extender_and_console import serve_both
from headroom.webhook.process import serve_webhook

#: Shorter than the settings allow, because an idle cluster usually sends an event only every
#: minute.
BLIND_AFTER_S = 8.0


def hasty(program: str, *options: str) -> Coroutine[Any, Any, None]:
    match program:
        case "serve":
            given: dict[str, str | bool] = {}
            for name, value in zip(options, [*options[1:], "--"], strict=True):
                if name.startswith("--"):
                    key = name.removeprefix("--").replace("-", "_")
                    given[key] = True if value.startswith("--") else value
            settings = load_settings(Path(str(given.pop("config"))), **given)
            pace = Pace(watch_s=2, grace_s=1.0, backoff_cap_s=1.0)
            blind = settings.model_copy(update={"blind_after_s": BLIND_AFTER_S})
            return serve_both(blind, print, pace)
        case "webhook":
            return serve_webhook(load_settings(Path(options[1])), print, Pace(absent_s=1.0))
        case "recorder":
            recorder.RETRY_S, profile_book.ENDED_EVERY_S = 0.5, 1.0
            return recorder.serve_recorder(Settings(debug_port=0), print, every_s=0.5)
    raise SystemExit(f"no program {program}")


if __name__ == "__main__":
    asyncio.run(hasty(*sys.argv[1:]))
