"""Settings of the agent, which are command-line flags. Most of them also have an environment
variable."""

import argparse
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from agent.settings_errors import errors, pool_bytes
from headroom.contract.annotations import DEVICE_CHOICE, UNIFIED_MEMORY, DeviceChoice
from headroom.contract.gpunode import Sharing
from headroom.contract.service_links import service_links
from headroom.system.listening import without_brackets

_CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
_POD_RESOURCES = "/var/lib/kubelet/pod-resources/kubelet.sock"


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of ``FLAGS``. Each field has the name of its flag."""

    node: str
    namespace: str
    interval_s: float
    heartbeat_s: float
    stale_after_s: float
    #: Host and port of ``listen``. Port 0 means any free port.
    host: str
    port: int
    local_port: int
    #: Host and port of ``metrics_listen``.
    metrics_host: str
    metrics_port: int
    #: PEM files for the port that serves metrics. If they are None, the port is closed.
    tls_cert: Path | None
    tls_key: Path | None
    #: Whether every client may read the metrics, also on the port of ``listen``.
    open_metrics: bool
    #: Whether a flag sets the sharing. If not, the sharing is detected, and the next three fields
    #: have no effect.
    sharing_stated: bool
    resource: str
    replicas: int
    sharing: Sharing
    checkpoint: Path
    pod_resources: Path
    proc: Path
    cgroups: Path
    #: URL of dcgm-exporter. If it is empty, DCGM is not used.
    dcgm_url: str
    dcgm_interval_s: float
    driver_timeout_s: float
    #: Memory of the host that a GPU without its own memory may use. 0 means that the agent computes
    #: the amount, and None that no amount is set.
    unified_memory_bytes: int | None
    #: The file that keeps devices unhealthy across restarts, or None for no file.
    state: Path | None
    device_choice: DeviceChoice
    pause_s: float
    once: bool
    as_json: bool
    #: Whether to report to a cluster. Metrics are served in any case.
    publish: bool


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting of the agent."""

    #: Name of the flag without dashes. The name of the environment variable is derived from the
    #: flag.
    flag: str
    default: str
    #: Unit of the value on the reference page. Empty for switches and choices.
    unit: str
    #: Description for --help and the reference page.
    consequence: str
    kind: Callable[[str], object] = str
    choices: tuple[str, ...] | None = None
    #: Name of the environment variable, if it is not derived from the flag.
    variable: str = ""

    @property
    def env(self) -> str:
        """Name of the environment variable. Empty if the flag has none."""
        if self.variable or not (self.unit or self.choices) or self.flag in _BY_HAND:
            return self.variable
        return f"{PREFIX}{self.flag.replace('-', '_').upper()}"


PREFIX = "HEADROOM_"
#: Flags for interactive use, which have no environment variable.
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
        "seconds between two samples, which is the maximum age of usage figures; at least 1",
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
        "at least the setting stale_after_s of the extenders. An agent that steers but cannot read"
        " the ledger when it ends rejects GPU pods for this time plus 15 s. After that, no extender"
        " uses the node, so the device plugin can choose devices again",
        float,
    ),
    Flag(
        "listen",
        ":9410",
        "HOST:PORT",
        "address of the gate; without a host, all addresses of IPv4 and IPv6",
    ),
    Flag(
        "metrics-listen",
        ":9412",
        "HOST:PORT",
        "address of the metrics over TLS; closed unless --tls-cert and --tls-key are set",
    ),
    Flag(
        "tls-cert",
        "",
        "path",
        "PEM file with the certificate of the metrics' port, which is read again when it changes",
    ),
    Flag("tls-key", "", "path", "PEM file with the private key of --tls-cert"),
    Flag(
        "metrics-access",
        "authorized",
        "",
        "who may read the metrics, which name the pods of all tenants. With authorized, a client"
        " needs a token whose user may get the path /metrics. With open, every client may read"
        " them, also without TLS on the port of --listen",
        choices=("authorized", "open"),
    ),
    Flag("local-port", "9411", "port", "loopback port for health and the report", int),
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
        "socket of the kubelet's PodResources service, which shows the names of pods with devices",
        Path,
    ),
    Flag("proc", "/proc", "path", "the host's /proc, to find the pod of each process", Path),
    Flag(
        "cgroups",
        "/sys/fs/cgroup",
        "path",
        "the host's cgroups, to read memory limits and to detect the end of pods that request GPUs"
        " only in init containers",
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
        "timeout of a driver call; a call that hangs longer makes its device unhealthy, but"
        " heartbeats continue",
        float,
    ),
    Flag(
        "unified-memory",
        "",
        "auto or quantity",
        "memory of the host that a GPU without memory of its own (GB10, Jetson) may use, on nodes"
        f" without the annotation {UNIFIED_MEMORY}. auto keeps a tenth free, and at least 2 GiB."
        " Without flag and annotation, such a GPU takes pods only if it is unshared",
    ),
    Flag(
        "state",
        "",
        "path",
        "file that keeps devices unhealthy across restarts of the agent; without it a failed device"
        " is healthy again after a restart. Files beside it keep the peaks of containers and the"
        " starts of pods that start alone",
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
    Flag("json", "", "", "print each status as JSON, without a cluster and an HTTP server"),
    Flag("no-publish", "", "", "serve metrics only, without a cluster"),
)
#: Other variables with this prefix, which may be set in the agent's environment. They belong to the
#: gate client, to ``agent.__main__`` (restarts) and to the command line tool ``headroom``.
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
        prog="headroom agent", description="Reports memory and SM activity of this node's GPUs."
    )
    for flag in FLAGS:
        help_text = flag.consequence + (f" (${flag.env})" if flag.env else "")
        if not flag.unit and flag.choices is None:
            parser.add_argument(f"--{flag.flag}", action="store_true", help=help_text)
            continue
        # These flags have no default, so the code below can find out whether one of them is set.
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
    for error in (*_unknown(env), *errors(args)):
        parser.error(error)
    host, _, port = args.listen.rpartition(":")
    metrics_host, _, metrics_port = args.metrics_listen.rpartition(":")
    return Settings(
        node=args.node,
        namespace=args.namespace,
        interval_s=args.interval,
        heartbeat_s=args.heartbeat,
        stale_after_s=args.stale_after,
        host=without_brackets(host),
        port=int(port),
        local_port=args.local_port,
        metrics_host=without_brackets(metrics_host),
        metrics_port=int(metrics_port),
        tls_cert=Path(args.tls_cert) if args.tls_cert else None,
        tls_key=Path(args.tls_key) if args.tls_key else None,
        open_metrics=args.metrics_access == "open",
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
        unified_memory_bytes=pool_bytes(args.unified_memory),
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
