"""Checks that credentials for the API server are read on a separate thread, and read again before
they expire.
"""

import asyncio
import threading

import pytest
from kubernetes.client import Configuration
from kubernetes.config import ConfigException

from headroom.runtime.kube.api_errors import NoAnswer
from headroom.runtime.kube.async_client import AsyncKubeApi, Credentials
from headroom.runtime.kube.client import KubeApi
from tests.scripted import Exchange, scripted_server
from tests.waiting import PATIENCE_S, until_then


def empty(exchange: Exchange) -> None:
    exchange.reply(200, {})


def with_plugin(configuration: Configuration, hook: object) -> Configuration:
    configuration.api_key["BearerToken"] = "Bearer old"
    configuration.refresh_api_key_hook = hook
    return configuration


def test_the_event_loop_continues_while_an_exec_plugin_runs() -> None:
    begun, end = threading.Event(), threading.Event()

    def plugin(configuration: Configuration) -> None:
        begun.set()
        assert end.wait(PATIENCE_S), "the loop is blocked"
        configuration.api_key["BearerToken"] = "Bearer new"

    async def play(configuration: Configuration) -> bytes:
        api = AsyncKubeApi(configuration)
        try:
            call = asyncio.create_task(api.call("GET", "/a"))
            await until_then(begun.is_set, "the plugin runs")
            end.set()
            return await call
        finally:
            await api.close()

    with scripted_server(empty) as server:
        answer = asyncio.run(play(with_plugin(server.configuration(), plugin)))
        assert answer == b"{}"
        (request,) = server.requests
        assert request.headers["authorization"] == "Bearer new"


def test_calls_use_the_previous_credentials_while_new_ones_are_read() -> None:
    begun, end = threading.Event(), threading.Event()
    reads: list[str] = []

    def read() -> dict[str, str]:
        reads.append("old" if not reads else "new")
        if reads[-1] == "new":
            begun.set()
            assert end.wait(PATIENCE_S)
        return {"authorization": reads[-1]}

    async def play() -> list[dict[str, str]]:
        credentials = Credentials(read, fresh_s=0.0)
        shown = [await credentials.headers(), await credentials.headers()]
        await until_then(begun.is_set, "they are read again")
        shown.append(await credentials.headers())
        end.set()
        await until_then(lambda: credentials._reading is None, "they have been read")
        return [*shown, await credentials.headers()]

    old, new = {"authorization": "old"}, {"authorization": "new"}
    assert asyncio.run(play()) == [old, old, old, new]


def test_a_hanging_plugin_does_not_delay_a_call() -> None:
    end = threading.Event()

    def read() -> dict[str, str]:
        end.wait()
        return {"authorization": "late"}

    async def play() -> dict[str, str]:
        credentials = Credentials(read, first_read_s=0.05)
        try:
            for _ in range(2):  # Both calls wait for the same read.
                with pytest.raises(OSError, match=r"not read within 0.05 s; does the exec plugin"):
                    await credentials.headers()
        finally:
            end.set()
        await until_then(lambda: credentials._reading is None, "they have been read")
        return await credentials.headers()

    assert asyncio.run(play()) == {"authorization": "late"}


def test_fresh_credentials_are_not_read_again() -> None:
    reads: list[None] = []

    def read() -> dict[str, str]:
        reads.append(None)
        return {}

    async def play() -> None:
        credentials = Credentials(read)
        await asyncio.gather(*(credentials.headers() for _ in range(5)))
        await credentials.headers()

    asyncio.run(play())
    assert len(reads) == 1


def test_unreadable_credentials_are_an_error_of_the_call() -> None:
    def plugin(configuration: Configuration) -> None:
        raise ConfigException("Token file exists but empty.")

    configuration = with_plugin(Configuration(), plugin)
    api = KubeApi(configuration)
    with pytest.raises(NoAnswer, match="GET /a: OSError: Token file exists but empty"):
        api.call("GET", "/a")
    with pytest.raises(NoAnswer, match="list: ConfigException"), api.asking("list"):
        configuration.auth_settings()
    api.close()

    async def play() -> None:
        loop_api = AsyncKubeApi(configuration)
        try:
            with pytest.raises(NoAnswer, match="GET /a: the credentials cannot be read: OSError"):
                await loop_api.call("GET", "/a")
        finally:
            await loop_api.close()

    asyncio.run(play())
