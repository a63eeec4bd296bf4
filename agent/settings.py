"""What the agent can be told: flags, with environment variables where a manifest needs them."""

import argparse
import difflib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from contract.annotations import DEVICE_CHOICE, DeviceChoice
from contract.gpunode import MAX_REPLICAS, Sharing
from contract.service_links import service_links

_CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
_POD_RESOURCES = "/var/lib/kubelet/pod-resources/kubelet.sock"


@dataclass(frozen=True, slots=True)
class Settings:
    #: Name of the node, and so of its GPUNode and of our Lease.
    node: str
    #: Where the Lease lives.
    namespace: str
    #: Seconds between two samples.
    interval_s: float
    #: Seconds between two heartbeats; after three without one the node is stale.
    heartbeat_s: float
    host: str
    #: 0: any free port.
    port: int
    #: On the loopback; 0: any free port.
    local_port: int
    #: How the device plugin shares whole GPUs, where it is stated rather than seen.
    resource: str
    replicas: int
    sharing: Sharing
    #: The node's dcgm-exporter, as in http://HOST:9400/metrics; empty: not read.
    dcgm_url: str
    #: Seconds between two scrapes of it.
    dcgm_interval_s: float
    #: Seconds after which a driver call counts as one that hangs.
    driver_timeout_s: float
    #: Where fences are remembered across restarts; None: nowhere.
    state: Path | None
    sharing_stated: bool
    #: The device manager's checkpoint.
    checkpoint: Path
    #: The socket of PodResources.
    pod_resources: Path
    #: The host's /proc.
    proc: Path
    #: The host's cgroups (v2).
    cgroups: Path
    #: Device choice of a node whose annotation names none.
    device_choice: DeviceChoice
    #: Print one sample and end.
    once: bool
    #: Seconds between the first sample and the one that is printed: some figures compare two.
    pause_s: float
    #: Print each status on stdout as JSON.
    as_json: bool
    #: Whether to report to a cluster; metrics are served in any case.
    publish: bool


@dataclass(frozen=True, slots=True)
class Flag:
    """One thing that the agent can be told."""

    #: Without its dashes; the variable is made of it, where it is not ``variable``.
    flag: str
    default: str
    #: Of the value, as in the reference page; empty for a switch.
    unit: str
    #: What it decides.
    consequence: str
    kind: Callable[[str], object] = str
    choices: tuple[str, ...] | None = None
    variable: str = ""

    @property
    def env(self) -> str:
        """The variable; empty where a manifest has no use for one."""
        if self.variable or not (self.unit or self.choices) or self.flag in _BY_HAND:
            return self.variable
        return f"{PREFIX}{self.flag.replace('-', '_').upper()}"


PREFIX = "HEADROOM_"
#: Of commands that people type.
_BY_HAND = ("pause",)
_STATED = "stated, not seen: wins over what plugin and kubelet tell"
FLAGS = (
    Flag(
        "node",
        "",
        "name",
        "the node, and so the GPUNode and the Lease that are written; needed to publish",
        variable="NODE_NAME",
    ),
    Flag("namespace", "headroom-system", "name", "where the Lease of the heartbeat is"),
    Flag(
        "interval",
        "5",
        "s",
        "between two samples: how old what is known of a device's use can be; 1 at least",
        float,
    ),
    Flag(
        "heartbeat",
        "30",
        "s",
        "between two heartbeats: after three without one the node takes no new pods",
        float,
    ),
    Flag("listen", "0.0.0.0:9410", "HOST:PORT", "where metrics and the gate are served"),
    Flag("local-port", "9411", "port", "of the loopback: health and the report", int),
    Flag("resource", "nvidia.com/gpu", "name", f"which resource the whole GPUs are; {_STATED}"),
    Flag("replicas", "1", "count", f"shares of each GPU; {_STATED}", int),
    Flag("sharing", "none", "", f"how the plugin shares; {_STATED}", choices=get_args(Sharing)),
    Flag(
        "checkpoint",
        _CHECKPOINT,
        "path",
        "the kubelet's device manager: which pod holds which replica",
        Path,
    ),
    Flag("pod-resources", _POD_RESOURCES, "path", "the same of the kubelet, by socket", Path),
    Flag("proc", "/proc", "path", "the host's /proc: which process is of which pod", Path),
    Flag("cgroups", "/sys/fs/cgroup", "path", "the host's /sys/fs/cgroup: limits", Path),
    Flag(
        "dcgm-url",
        "",
        "URL",
        "the node's dcgm-exporter, for SM activity: http://HOST:9400/metrics; else NVML tells",
    ),
    Flag("dcgm-interval", "10", "s", "between two scrapes of it", float),
    Flag(
        "driver-timeout",
        "10",
        "s",
        "of a driver call: one that hangs longer costs its device, not the heartbeat",
        float,
    ),
    Flag(
        "state",
        "",
        "path",
        "file in which fences outlive a restart; else a failed device is tried again after one",
    ),
    Flag(
        "device-choice",
        "predicted",
        "",
        f"of a node without the annotation {DEVICE_CHOICE}: steered makes the kubelet take the"
        " device that the ledger chose",
        choices=(DeviceChoice.PREDICTED.value, DeviceChoice.STEERED.value),
    ),
    Flag("pause", "1", "s", "before the sample of --once, since some figures compare two", float),
    Flag("once", "", "", "print who uses the GPUs as a table, and end"),
    Flag("json", "", "", "print each status as JSON; no cluster, no server"),
    Flag("no-publish", "", "", "serve metrics only"),
)
#: Variables of ours that are for others: the gate of a pod, people, and this process itself when it
#: begins anew.
OTHERS = (
    "HEADROOM_AGENT_PORT",
    "HEADROOM_AGENT_RESTARTS",
    "HEADROOM_CACHE",
    "HEADROOM_SERVER",
    "HEADROOM_TOKEN",
)


def read_settings(argv: Sequence[str], env: Mapping[str, str]) -> Settings:
    """Read the command line, and before it what the environment says; ends the process with a
    message (status 2) where it cannot be used."""
    parser = argparse.ArgumentParser(
        prog="headroom-agent", description="Reports what the GPUs of this node really measure."
    )
    for knob in FLAGS:
        told = knob.consequence + (f" (${knob.env})" if knob.env else "")
        if not knob.unit and knob.choices is None:
            parser.add_argument(f"--{knob.flag}", action="store_true", help=told)
            continue
        stated = knob.flag in ("resource", "replicas", "sharing")
        parser.add_argument(
            f"--{knob.flag}",
            default=env.get(knob.env, None if stated else knob.default),
            type=knob.kind,
            choices=knob.choices,
            metavar=None if knob.choices else knob.unit.split(",")[0].upper(),
            help=told,
        )
    args = parser.parse_args(argv)
    known = {knob.env for knob in FLAGS} | {*OTHERS} | service_links(env)
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, sorted(known - {""}), 1)
            right = f"; right is, perhaps, {close[0]}" if close else ", see docs/settings.md"
            parser.error(f"${name} is no setting of the agent{right}")
    sharing_stated = any((args.resource, args.replicas is not None, args.sharing))
    args.resource = args.resource or "nvidia.com/gpu"
    args.replicas = 1 if args.replicas is None else args.replicas
    args.sharing = args.sharing or "none"
    host, _, port = args.listen.rpartition(":")
    if not args.node and not (args.once or args.json):
        parser.error("no node name: set NODE_NAME or pass --node, for example --node gpu-node-1")
    if not port.isdecimal() or len(port) > 5 or not 0 <= int(port) < 1 << 16:
        parser.error(f"--listen {args.listen!r} is not HOST:PORT; right is, for example, :9410")
    if not 0 <= args.local_port < 1 << 16:
        parser.error(f"--local-port {args.local_port} is not 0..65535. Example: --local-port 9411")
    if args.sharing not in get_args(Sharing):
        parser.error(f"--sharing {args.sharing!r} is none of {', '.join(get_args(Sharing))}")
    if not 1 <= args.replicas <= MAX_REPLICAS:
        parser.error(f"--replicas {args.replicas} is not 1..{MAX_REPLICAS}")
    if (args.replicas > 1) != (args.sharing != "none"):
        parser.error(
            f"--replicas {args.replicas} and --sharing {args.sharing} contradict each other; "
            "right is, for example, --replicas 4 --sharing time-slicing"
        )
    if not 1 <= args.interval <= args.heartbeat:
        parser.error(
            f"--interval {args.interval} is not between 1 and the heartbeat ({args.heartbeat}); "
            "right is, for example, --interval 5 --heartbeat 30"
        )
    url = urllib.parse.urlsplit(args.dcgm_url)
    if args.dcgm_url and not (url.scheme == "http" and url.hostname and _has_port(url)):
        parser.error(
            f"--dcgm-url {args.dcgm_url!r} cannot be scraped; "
            "right is, for example, --dcgm-url http://nvidia-dcgm-exporter.gpu-operator:9400/metrics"
        )
    if not args.dcgm_interval > 0:
        parser.error(
            f"--dcgm-interval {args.dcgm_interval} is not more than 0; "
            "right is, for example, --dcgm-interval 10"
        )
    if not 0 <= args.pause <= 60:
        parser.error(f"--pause {args.pause} is not 0..60; right is, for example, --pause 1")
    if not 0 < args.driver_timeout <= args.heartbeat:
        parser.error(
            f"--driver-timeout {args.driver_timeout} is not between 0 and the heartbeat "
            f"({args.heartbeat}); right is, for example, --driver-timeout 10"
        )
    choices = [DeviceChoice.PREDICTED.value, DeviceChoice.STEERED.value]
    if args.device_choice not in choices:  # argparse does not look at what the environment says
        parser.error(
            f"--device-choice {args.device_choice!r} is not one of {', '.join(choices)}. "
            "Example: --device-choice steered"
        )
    device_choice = DeviceChoice(args.device_choice)
    if device_choice is DeviceChoice.STEERED and (args.no_publish or args.json):
        parser.error(
            "--device-choice steered reads the ledger at the API server, so it cannot be combined "
            "with --no-publish or --json"
        )
    return Settings(
        node=args.node,
        namespace=args.namespace,
        interval_s=args.interval,
        heartbeat_s=args.heartbeat,
        host=host,
        port=int(port),
        local_port=args.local_port,
        resource=args.resource,
        replicas=args.replicas,
        sharing=args.sharing,
        dcgm_url=args.dcgm_url,
        dcgm_interval_s=args.dcgm_interval,
        driver_timeout_s=args.driver_timeout,
        state=Path(args.state) if args.state else None,
        sharing_stated=sharing_stated,
        checkpoint=args.checkpoint,
        pod_resources=args.pod_resources,
        proc=args.proc,
        cgroups=args.cgroups,
        device_choice=device_choice,
        once=args.once,
        pause_s=args.pause,
        as_json=args.json,
        publish=not args.no_publish,
    )


def _has_port(url: urllib.parse.SplitResult) -> bool:
    """Whether the port is left out or one that exists."""
    try:
        return url.port is None or url.port > 0
    except ValueError:
        return False
