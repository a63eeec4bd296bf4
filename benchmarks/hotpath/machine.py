"""Describes the machine and the versions with which a result was measured."""

import io
import os
import platform
from importlib.metadata import version

import numpy as np
import structlog

_MATTER = ("numpy", "msgspec", "pydantic", "fastapi", "starlette", "uvicorn", "uvloop", "httptools")


def quiet() -> None:
    """Create log lines, but keep them off the terminal."""
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(io.StringIO()),
        cache_logger_on_first_use=True,
    )


def processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return models[0] if models else platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _MATTER}}


def machine() -> str:
    return (
        f"{processor()}, {cores()} cores, "
        f"Python {platform.python_version()}, numpy {np.__version__}, msgspec {version('msgspec')}"
    )
