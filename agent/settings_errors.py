"""Errors in the settings of the agent, each with a valid example."""

import argparse
import math
import urllib.parse
from collections.abc import Iterator
from typing import get_args

from headroom.contract.annotations import DeviceChoice, parse_unified_memory
from headroom.contract.errors import BadAnnotation
from headroom.contract.gpunode import MAX_REPLICAS, Sharing


def errors(args: argparse.Namespace) -> Iterator[str]:
    """Yield an error with a valid example for each invalid argument."""
    if not args.node and not (args.once or args.json):
        yield "no node name: set NODE_NAME or pass --node. Example: --node gpu-node-1"
    if not _has_port(args.listen):
        yield f"--listen {args.listen!r} is not HOST:PORT. Example: --listen :9410"
    if not _has_port(args.metrics_listen):
        where = args.metrics_listen
        yield f"--metrics-listen {where!r} is not HOST:PORT. Example: --metrics-listen :9412"
    if bool(args.tls_cert) != bool(args.tls_key):
        example = "--tls-cert tls.crt --tls-key tls.key"
        yield f"--tls-cert and --tls-key must be set together. Example: {example}"
    if args.metrics_access not in ("authorized", "open"):
        access = f"--metrics-access {args.metrics_access!r}"
        yield f"{access} is not one of authorized, open. Example: --metrics-access authorized"
    if not 0 <= args.local_port < 1 << 16:
        yield f"--local-port {args.local_port} is not 0..65535. Example: --local-port 9411"
    example = "Example: --replicas 4 --sharing time-slicing"
    # argparse does not check values from the environment.
    if args.sharing not in get_args(Sharing):
        kinds = ", ".join(get_args(Sharing))
        yield f"--sharing {args.sharing!r} is not one of {kinds}. {example}"
    if not 1 <= args.replicas <= MAX_REPLICAS:
        yield f"--replicas {args.replicas} is not 1..{MAX_REPLICAS}. {example}"
    if (args.replicas > 1) != (args.sharing != "none"):
        both = f"--replicas {args.replicas} and --sharing {args.sharing}"
        yield f"{both} contradict each other. {example}"
    if not 1 <= args.interval <= args.heartbeat:
        yield (
            f"--interval {args.interval} is not between 1 and the heartbeat ({args.heartbeat}). "
            "Example: --interval 5 --heartbeat 30"
        )
    if not args.heartbeat <= args.stale_after < math.inf:
        yield (
            f"--stale-after {args.stale_after} is less than the heartbeat ({args.heartbeat}) or "
            "infinite. Example: --stale-after 90"
        )
    if args.dcgm_url and (wrong := _why_not_scraped(args.dcgm_url)):
        yield (
            f"--dcgm-url {wrong}. "
            "Example: --dcgm-url http://nvidia-dcgm-exporter.gpu-operator:9400/metrics"
        )
    if not args.dcgm_interval > 0:
        interval = args.dcgm_interval
        yield f"--dcgm-interval {interval} is not greater than 0. Example: --dcgm-interval 10"
    try:
        pool_bytes(args.unified_memory)
    except BadAnnotation as err:
        yield f"--unified-memory {args.unified_memory!r} {err.why}. Example: --unified-memory 96Gi"
    if not 0 <= args.pause <= 60:
        yield f"--pause {args.pause} is not 0..60. Example: --pause 1"
    if not 0 < args.driver_timeout <= args.heartbeat:
        yield (
            f"--driver-timeout {args.driver_timeout} is not between 0 and the heartbeat "
            f"({args.heartbeat}). Example: --driver-timeout 10"
        )
    choices = [DeviceChoice.PREDICTED.value, DeviceChoice.STEERED.value]
    if args.device_choice not in choices:
        yield (
            f"--device-choice {args.device_choice!r} is not one of {', '.join(choices)}. "
            "Example: --device-choice steered"
        )
    if args.device_choice == DeviceChoice.STEERED.value and (args.no_publish or args.json):
        yield (
            "--device-choice steered reads the ledger at the API server, so it cannot be combined "
            "with --no-publish or --json"
        )


def _has_port(address: str) -> bool:
    port = address.rpartition(":")[2]
    return port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16


def pool_bytes(text: str) -> int | None:
    """Return the amount of ``--unified-memory`` in bytes, or 0 for auto, or None if the text is
    empty.

    Raises ``BadAnnotation``, because the annotation accepts the same values.
    """
    return parse_unified_memory(text) if text else None


def _why_not_scraped(text: str) -> str:
    """Return why the agent cannot scrape this URL, or an empty string if it can."""
    try:
        url = urllib.parse.urlsplit(text)
        if url.username is not None or url.password is not None:
            # The message must not contain the password.
            return f"has a user name or a password for {url.hostname}, which the agent never sends"
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # the port is not a number, or the host has one bracket
        return "is not a URL"
    if not is_valid:
        return f"{text!r} is not a URL with http:// and a host"
    if url.scheme == "https":
        return f"{text!r} uses TLS, which the agent does not support. Serve the metrics over http"
    return ""
