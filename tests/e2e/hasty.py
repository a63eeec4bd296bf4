"""``headroom serve`` that ends a silent watch after seconds instead of a minute and a half:

python -m tests.e2e.hasty serve --config FILE --host HOST --debug-open --verbs-port PORT
--debug-port PORT
"""

import asyncio
import sys
from pathlib import Path

from headroom.runtime.kube.reflector import Pace
from headroom.runtime.settings.loading import load_settings
from headroom.runtime.settings.settings import Settings
from headroom.serve.extender_and_console import serve_both

BLIND_AFTER_S = 8.0
PACE = Pace(watch_s=2, grace_s=1.0, backoff_cap_s=1.0)


def settings_of(options: list[str]) -> Settings:
    shown: dict[str, str | bool] = {}
    for name, value in zip(options, [*options[1:], "--"], strict=True):
        if name.startswith("--"):
            given = True if value.startswith("--") else value
            shown[name.removeprefix("--").replace("-", "_")] = given
    file = Path(str(shown.pop("config")))
    # Shorter than the settings allow, because a quiet cluster usually sends an event only every
    # minute.
    return load_settings(file, **shown).model_copy(update={"blind_after_s": BLIND_AFTER_S})


if __name__ == "__main__":
    asyncio.run(serve_both(settings_of(sys.argv[2:]), print, PACE))
