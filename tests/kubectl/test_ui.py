"""Checks that `kubectl headroom ui` continues after an error, and prints each error once."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import httpx
import pytest

from headroom.kubectl.debug_api_client import UNREACHABLE, CommandError, Response
from headroom.kubectl.transport import Address
from headroom.kubectl.ui import Page
from tests.answering import answering
from tests.loopback import LOOPBACK


class Failing(Address):
    """An address whose requests fail once with each error, and then succeed."""

    def __init__(self, url: str, *errors: str) -> None:
        super().__init__(url)
        self._errors = list(errors)

    @contextlib.contextmanager
    def open(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Response]:
        if self._errors:
            raise CommandError(self._errors.pop(0), UNREACHABLE)
        with super().open(method, target, body, headers) as response:
            yield response


@pytest.fixture
def console() -> Iterator[str]:
    with answering(lambda _: (200, b"fleet")) as url:
        yield url


def test_each_error_is_printed_once(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as after:
        page = after.enter_context(Page(Failing(console, "gone", "gone", "gone", "away")))
        thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        after.callback(thread.join)
        after.callback(page.shutdown)
        for _ in range(4):
            with pytest.raises(httpx.TransportError):
                LOOPBACK.get(f"{page.url}v1/fleet")
        assert LOOPBACK.get(f"{page.url}v1/fleet").text == "fleet"
        guessed = page.url.rpartition("/")[0].rpartition("/")[0]
        assert LOOPBACK.get(f"{guessed}/other/v1/fleet").status_code == 404
    assert capsys.readouterr().err.splitlines() == [
        f"kubectl headroom: {console}: gone",
        f"kubectl headroom: {console}: away",
    ]
