"""Settings of the agent: command-line flags, most of them with an environment variable."""

import argparse
import difflib
import math
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from contract.annotations import (
    DEVICE_CHOICE,
    UNIFIED_MEMORY,
    DeviceChoice,
    parse_unified_memory,
)
from contract.errors import BadAnnotation
from contract.gpunode import MAX_REPLICAS, Sharing
from contract.listening import without_brackets
from contract.service_links import service_links

_CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
_POD_RESOURCES = "/var/lib/kubelet/pod-resources/kubelet.sock"


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of ``FLAGS``, each under the name of its flag."""

    node: str
    namespace: str
    interval_s: float
    heartbeat_s: float
    stale_after_s: float
    #: Host and port of ``listen``; port 0 is any free port.
    host: str
    port: int
    local_port: int
    #: Whether a flag sets the sharing. If not, it is detected, and the next three have no effect.
    sharing_stated: bool
    resource: str
    replicas: int
    sharing: Sharing
    checkpoint: Path
    pod_resources: Path
    proc: Path
    cgroups: Path
    #: Empty: DCGM is not used.
    dcgm_url: str
    dcgm_interval_s: float
    driver_timeout_s: float
    #: Memory of the host that a GPU without its own may use; 0: computed; None: not set.
    unified_memory_bytes: int | None
    #: None: no file.
    state: Path | None
    device_choice: DeviceChoice
    pause_s: float
    once: bool
    as_json: bool
    #: Whether to report to a cluster; metrics are always served.
    publish: bool


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting of the agent."""

    #: Name of the flag without dashes. The variable's name is derived from it.
    flag: str
    default: str
    #: Unit of the value in the reference page; empty for a switch or a choice.
    unit: str
    #: Description for --help and the reference page.
    consequence: str
    kind: Callable[[str], object] = str
    choices: tuple[str, ...] | None = None
    #: Name of the variable, if it is not derived from the flag.
    variable: str = ""

    @property
    def env(self) -> str:
        """Name of the environment variable; empty if the flag has none."""
        if self.variable or not (self.unit or self.choices) or self.flag in _BY_HAND:
            return self.variable
        return f"{PREFIX}{self.flag.replace('-', '_').upper()}"


PREFIX = "HEADROOM_"
#: Flags without a variable, because they are used interactively.
_BY_HAND = ("pause",)
_OVERRIDES = "overrides the sharing detected from plugin and kubelet"
FLAGS = (
    Flag(
        "node",
        "",
        "name",
        "name of the node, its GPUNode and its Lease; required to publish",
        variable="NODE_NAME",
    ),
    Flag("namespace", "headroom-system", "name", "namespace of the heartbeat's Lease"),
    Flag(
        "interval",
        "5",
        "s",
        "seconds between two samples, so the maximum age of usage figures; at least 1",
        float,
    ),
    Flag(
        "heartbeat",
        "30",
        "s",
        "seconds between two heartbeats; after three missed ones the node takes no new pods",
        float,
    ),
    Flag(
        "stale-after",
        "90",
        "s",
        "at least the setting stale_after_s of the extenders. An agent that steers, and cannot read"
        " the ledger when it ends, rejects GPU pods for this time and 15 s: then no extender uses"
        " the node, and the device plugin can choose again",
        float,
    ),
    Flag(
        "listen",
        ":9410",
        "HOST:PORT",
        "address of metrics and the gate; without a host, all addresses of IPv4 and IPv6",
    ),
    Flag("local-port", "9411", "port", "port of health and the report, on the loopback", int),
    Flag("resource", "nvidia.com/gpu", "name", f"resource name of whole GPUs; {_OVERRIDES}"),
    Flag("replicas", "1", "count", f"replicas of each GPU; {_OVERRIDES}", int),
    Flag("sharing", "none", "", f"how GPUs are shared; {_OVERRIDES}", choices=get_args(Sharing)),
    Flag(
        "checkpoint",
        _CHECKPOINT,
        "path",
        "checkpoint of the kubelet's device manager, which shows which pod holds which replica",
        Path,
    ),
    Flag(
        "pod-resources",
        _POD_RESOURCES,
        "path",
        "socket of the kubelet's PodResources service, which shows the names of these pods",
        Path,
    ),
    Flag("proc", "/proc", "path", "the host's /proc, to find the pod of each process", Path),
    Flag(
        "cgroups",
        "/sys/fs/cgroup",
        "path",
        "the host's cgroups, for memory limits and to detect the end of pods that request GPUs in"
        " init containers only",
        Path,
    ),
    Flag(
        "dcgm-url",
        "",
        "URL",
        "the node's dcgm-exporter, such as http://HOST:9400/metrics; without it SM activity comes"
        " from NVML",
    ),
    Flag("dcgm-interval", "10", "s", "seconds between two scrapes of dcgm-exporter", float),
    Flag(
        "driver-timeout",
        "10",
        "s",
        "timeout of a driver call; one that hangs longer makes its device unhealthy, and heartbeats"
        " go on",
        float,
    ),
    Flag(
        "unified-memory",
        "",
        "auto or quantity",
        "memory of the host that a GPU without memory of its own (GB10, Jetson) may use, on nodes"
        f" without the annotation {UNIFIED_MEMORY}; auto: all but a tenth and at least 2 GiB."
        " Without both, such a GPU takes pods only if it is unshared",
    ),
    Flag(
        "state",
        "",
        "path",
        "file that keeps devices unhealthy across restarts of the agent; without it a failed device"
        " is healthy again after a restart. Peaks of containers, and starts of pods that start"
        " alone, are kept in files beside it",
    ),
    Flag(
        "device-choice",
        "predicted",
        "",
        f"device choice of a node without the annotation {DEVICE_CHOICE}; with steered the kubelet"
        " allocates the device that the ledger chose",
        choices=(DeviceChoice.PREDICTED.value, DeviceChoice.STEERED.value),
    ),
    Flag("pause", "1", "s", "seconds between the two samples of --once", float),
    Flag("once", "", "", "print the use of the GPUs as a table and exit"),
    Flag("json", "", "", "print each status as JSON; no cluster, no HTTP server"),
    Flag("no-publish", "", "", "serve metrics only, without a cluster"),
)
#: Other variables with this prefix: of the gate client, of ``agent.__main__`` (restarts), and of
#: the command line tool ``headroom``. They may be set in the agent's environment.
OTHERS = (
    "HEADROOM_AGENT_PORT_NUMBER",
    "HEADROOM_AGENT_RESTARTS",
    "HEADROOM_CACHE",
    "HEADROOM_SERVER",
    "HEADROOM_TOKEN",
)


def read_settings(argv: Sequence[str], env: Mapping[str, str]) -> Settings:
    """Read the settings from the command line, with defaults from the environment.

    Exits with a message and status 2 if a setting is invalid.
    """
    parser = argparse.ArgumentParser(
        prog="headroom-agent", description="Reports memory and SM activity of this node's GPUs."
    )
    for flag in FLAGS:
        help_text = flag.consequence + (f" (${flag.env})" if flag.env else "")
        if not flag.unit and flag.choices is None:
            parser.add_argument(f"--{flag.flag}", action="store_true", help=help_text)
            continue
        # Without a default, to find out below whether any of them is set.
        sets_sharing = flag.flag in ("resource", "replicas", "sharing")
        parser.add_argument(
            f"--{flag.flag}",
            default=env.get(flag.env, None if sets_sharing else flag.default),
            type=flag.kind,
            choices=flag.choices,
            metavar=None if flag.choices else flag.unit.split(",")[0].upper(),
            help=help_text,
        )
    args = parser.parse_args(argv)
    sharing_stated = any((args.resource, args.replicas is not None, args.sharing))
    args.resource = args.resource or "nvidia.com/gpu"
    args.replicas = 1 if args.replicas is None else args.replicas
    args.sharing = args.sharing or "none"
    for error in (*_unknown(env), *_errors(args)):
        parser.error(error)
    host, _, port = args.listen.rpartition(":")
    return Settings(
        node=args.node,
        namespace=args.namespace,
        interval_s=args.interval,
        heartbeat_s=args.heartbeat,
        stale_after_s=args.stale_after,
        host=without_brackets(host),
        port=int(port),
        local_port=args.local_port,
        sharing_stated=sharing_stated,
        resource=args.resource,
        replicas=args.replicas,
        sharing=args.sharing,
        checkpoint=args.checkpoint,
        pod_resources=args.pod_resources,
        proc=args.proc,
        cgroups=args.cgroups,
        dcgm_url=args.dcgm_url,
        dcgm_interval_s=args.dcgm_interval,
        driver_timeout_s=args.driver_timeout,
        unified_memory_bytes=_pool_bytes(args.unified_memory),
        state=Path(args.state) if args.state else None,
        device_choice=DeviceChoice(args.device_choice),
        pause_s=args.pause,
        once=args.once,
        as_json=args.json,
        publish=not args.no_publish,
    )


def _unknown(env: Mapping[str, str]) -> Iterator[str]:
    """Yield an error for each environment variable with ``PREFIX`` that is not a setting."""
    known = {flag.env for flag in FLAGS} | {*OTHERS} | service_links(env)
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, sorted(known - {""}), 1)
            hint = f"; did you mean {close[0]}?" if close else ", see docs/reference/settings.md"
            yield f"${name} is not a setting of the agent{hint}"


def _errors(args: argparse.Namespace) -> Iterator[str]:
    """Yield an error with a valid example for each invalid argument."""
    port = args.listen.rpartition(":")[2]
    if not args.node and not (args.once or args.json):
        yield "no node name: set NODE_NAME or pass --node. Example: --node gpu-node-1"
    if not port.isdecimal() or len(port) > 5 or not 0 <= int(port) < 1 << 16:
        yield f"--listen {args.listen!r} is not HOST:PORT. Example: --listen :9410"
    if not 0 <= args.local_port < 1 << 16:
        yield f"--local-port {args.local_port} is not 0..65535. Example: --local-port 9411"
    example = "Example: --replicas 4 --sharing time-slicing"
    # argparse does not check values of the environment.
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
            f"--stale-after {args.stale_after} is less than the heartbeat ({args.heartbeat}), or "
            "has no end. Example: --stale-after 90"
        )
    if args.dcgm_url and (wrong := _why_not_scraped(args.dcgm_url)):
        yield (
            f"--dcgm-url {wrong}. "
            "Example: --dcgm-url http://nvidia-dcgm-exporter.gpu-operator:9400/metrics"
        )
    if not args.dcgm_interval > 0:
        interval = args.dcgm_interval
        yield f"--dcgm-interval {interval} is not more than 0. Example: --dcgm-interval 10"
    try:
        _pool_bytes(args.unified_memory)
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


def _pool_bytes(text: str) -> int | None:
    """Return the amount of ``--unified-memory`` in bytes; 0 for auto, None if it is empty.

    Raises ``BadAnnotation``: the annotation has the same values.
    """
    return parse_unified_memory(text) if text else None


def _why_not_scraped(text: str) -> str:
    """Return why the agent cannot scrape this URL; empty if it can."""
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
        return f"{text!r} is TLS, which the agent does not support. Serve the metrics over http"
    return ""
