"""Checks that programs are recognised by image, arguments and environment."""

import pytest

from headroom.core.recommend.programs import Family, program, repository, setting


@pytest.mark.parametrize(
    ("image", "command", "args", "environment", "family"),
    [
        ("vllm/vllm-openai:v0.32.0", (), ("--model", "m"), {}, Family.VLLM),
        ("registry/own:1", ("vllm", "serve"), (), {}, Family.VLLM),
        ("own", (), (), {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, Family.JAX),
        ("tensorflow/tensorflow:2.21-gpu", (), (), {}, Family.TENSORFLOW),
        ("pytorch/pytorch", ("torchrun", "t.py"), (), {}, Family.PYTORCH),
        # The image contains the names of an engine and of the framework on which the engine is
        # based.
        ("pytorch/vllm", (), (), {}, Family.VLLM),
        # Values of variables do not count.
        ("own/model", ("python", "s.py"), (), {"MODE": "torch"}, Family.UNKNOWN),
    ],
)
def test_the_family_of_a_program_is_recognised(
    image: str,
    command: tuple[str, ...],
    args: tuple[str, ...],
    environment: dict[str, str],
    family: Family,
) -> None:
    assert program(image, command, args, environment).family is family


def test_the_fingerprint_ignores_the_version_and_the_order_of_variables() -> None:
    first = program("r:5000/a/b:1.0", ("run",), ("--x",), {"A": "1", "B": "2"})
    assert program("r:5000/a/b@sha256:00", ("run",), ("--x",), {"B": "2", "A": "1"}) == first
    assert program("r:5000/a/b:1.0", ("run",), ("--y",), {"A": "1", "B": "2"}) != first
    assert program("r:5000/a/b:1.0", ("run",), ("--x",), {"A": "1", "B": "3"}) != first
    assert program("r:5000/a/b:1.0", ("run", "--x"), (), {"A": "1", "B": "2"}) != first
    assert len(first.fingerprint) == 12


def test_the_repository_keeps_the_port_of_a_registry() -> None:
    assert repository("host:5000/a/b:tag") == "host:5000/a/b"
    assert repository("host:5000/a/b") == "host:5000/a/b"
    assert repository("b:tag@sha256:0") == "b"


def test_the_deciding_setting_of_a_program_is_named() -> None:
    assert "--gpu-memory-utilization" in setting(Family.VLLM, self_sized=True)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in setting(Family.JAX, self_sized=True)
    assert "caching allocator" in setting(Family.PYTORCH, self_sized=False)
    assert "allocates memory once" in setting(Family.UNKNOWN, self_sized=True)
    assert setting(Family.VLLM, self_sized=False) == ""
