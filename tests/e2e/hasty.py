"""``headroom serve`` that is blind after seconds where others take a minute and a half:
python -m tests.e2e.hasty serve --config FILE --host HOST --debug-open --verbs-port PORT
--debug-port PORT"""

import asyncio
import sys
from pathlib import Path

from extender.app.serve import serve_both
from extender.config.loading import load_settings
from extender.config.settings import Settings
from extender.kube.reflector import Pace

BLIND_AFTER_S = 8.0
PACE = Pace(watch_s=2, grace_s=1.0, backoff_cap_s=1.0)


def settings_of(options: list[str]) -> Settings:
    shown: dict[str, str | bool] = {}
    for name, value in zip(options, [*options[1:], "--"], strict=True):
        if name.startswith("--"):
            given = True if value.startswith("--") else value
            shown[name.removeprefix("--").replace("-", "_")] = given
    file = Path(str(shown.pop("config")))
    # Shorter than settings allow: a quiet cluster usually sends an event only every minute.
    return load_settings(file, **shown).model_copy(update={"blind_after_s": BLIND_AFTER_S})


if __name__ == "__main__":
    asyncio.run(serve_both(settings_of(sys.argv[2:]), print, PACE))
