"""Tests how often `kubectl headroom` creates a session, and who can read the file of a session."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headroom.contract.console import LIFETIME_S, csr_name
from headroom.kubectl.debug_api_client import UNREACHABLE, CommandError
from headroom.kubectl.sessions import USED_S, Sessions, folder


class UserSessions:
    """Runs commands of a user. Each command has its own ``Sessions``."""

    def __init__(self, path: Path) -> None:
        self.path = path / "headroom"
        self.now_s = 1e9
        self.created: list[dict[str, Any]] = []

    def sessions(self) -> Sessions:
        return Sessions(self.created.append, self.path, lambda: self.now_s)

    def secret(self, *credential: bytes) -> str:
        return self.sessions().secret(*(credential or (b"server", b"token")))

    def files(self) -> list[Path]:
        return sorted(self.path.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> UserSessions:
    return UserSessions(tmp_path)


def test_commands_share_a_session_until_shortly_before_its_expiry(world: UserSessions) -> None:
    first = world.secret()
    world.now_s += USED_S - 1
    assert world.secret() == first
    assert len(world.created) == 1
    world.now_s += 1
    assert USED_S < LIFETIME_S
    assert world.secret() != first
    # The age of the session is unknown, because the clock was set back.
    world.now_s -= 10
    world.secret()
    assert len(world.created) == 3


def test_the_request_contains_only_the_hash_of_the_secret(world: UserSessions) -> None:
    secret = world.secret()
    (csr,) = world.created
    assert csr["metadata"] == {"name": csr_name(secret)}
    assert csr["spec"]["signerName"] == "headroom.gpu/console"
    assert csr["spec"]["expirationSeconds"] == LIFETIME_S
    assert secret not in json.dumps(csr)


def test_each_credential_has_its_own_session(world: UserSessions) -> None:
    others = [(b"server", b"token"), (b"server", b"other"), (b"other", b"token"), (b"servertoken",)]
    assert len({world.secret(*each) for each in others}) == len(others)
    assert len({csr["metadata"]["name"] for csr in world.created}) == len(others)


def test_a_session_that_the_console_rejects_is_not_used_again(world: UserSessions) -> None:
    sessions = world.sessions()
    first = sessions.secret(b"token")
    sessions.forget(b"token")
    assert sessions.secret(b"token") != first
    assert world.secret(b"token") != first


def test_no_other_user_can_read_the_file_and_no_secret_remains(world: UserSessions) -> None:
    world.secret(b"credential of the user")
    assert world.path.stat().st_mode & 0o777 == 0o700
    (file,) = world.files()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "credential" not in file.name + file.read_text()
    os.utime(file, (world.now_s, world.now_s))
    world.now_s += LIFETIME_S + 1
    world.secret(b"another credential")
    assert file not in world.files()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[1, 2]", '["short", 1e9]', "null", '["' + "s" * 43 + '", "x"]',
     '["' + "s" * 43 + '", NaN]', '["' + "s" * 43 + '", null]'],
)  # fmt: skip
def test_a_damaged_file_is_replaced(world: UserSessions, content: str) -> None:
    world.secret()
    (file,) = world.files()
    file.write_text(content)
    assert world.secret() != "s" * 43
    assert len(world.created) == 2
    world.secret()
    assert len(world.created) == 2


def test_a_file_that_other_users_can_read_or_wrote_is_not_used(
    world: UserSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.secret()
    (file,) = world.files()
    file.chmod(0o640)
    second = world.secret()
    assert second != first
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert world.secret() != second


def test_with_an_unwritable_folder_each_command_creates_a_session(
    world: UserSessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.path = tmp_path / "file" / "headroom"
    (tmp_path / "file").touch()
    sessions = world.sessions()
    assert sessions.secret(b"t") == sessions.secret(b"t")
    assert len(world.created) == 1
    world.secret(b"t")
    assert len(world.created) == 2
    monkeypatch.delenv("KUBECACHEDIR", raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    world.path = folder()
    world.secret(b"t")
    assert len(world.created) == 3


def test_nothing_is_stored_if_the_request_is_rejected(world: UserSessions) -> None:
    def rejects(csr: object) -> None:
        raise CommandError("forbidden", UNREACHABLE)

    sessions = Sessions(rejects, world.path, lambda: world.now_s)
    for _ in range(2):
        with pytest.raises(CommandError):
            sessions.secret(b"t")
    assert not world.path.exists()
