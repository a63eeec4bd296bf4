"""``headroom recorder`` with short intervals: python -m tests.recorder.hasty recorder
--debug-port 0"""

import asyncio

from headroom.recorder import process as recorder
from headroom.recorder import profile_book
from headroom.runtime.settings.settings import Settings

if __name__ == "__main__":
    recorder.RETRY_S = 0.5
    profile_book.ENDED_EVERY_S = 1.0
    asyncio.run(recorder.serve_recorder(Settings(debug_port=0), print, every_s=0.5))
