"""What the agent can be told: flags, with environment variables where a manifest needs them."""

import argparse
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from contract.gpunode import MAX_REPLICAS, Sharing

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
    #: Resources of which we make the kubelet take the device that the ledger chose.
    steer: tuple[str, ...]
    #: Print one sample and end.
    once: bool
    #: Seconds between the first sample and the one that is printed: some figures compare two.
    pause_s: float
    #: Print each status on stdout as JSON.
    as_json: bool
    #: Whether to report to a cluster; metrics are served in any case.
    publish: bool


def read_settings(argv: Sequence[str], env: Mapping[str, str]) -> Settings:
    """Read the command line; ends the process with a message (status 2) where it cannot be used."""
    parser = argparse.ArgumentParser(
        prog="headroom-agent", description="Reports what the GPUs of this node really measure."
    )
    add = parser.add_argument
    add("--node", default=env.get("NODE_NAME", ""), help="name of this node ($NODE_NAME)")
    add("--namespace", default=env.get("HEADROOM_NAMESPACE", "headroom-system"))
    add("--interval", type=float, default=5.0, metavar="S", help="seconds between samples")
    add("--heartbeat", type=float, default=30.0, metavar="S", help="seconds between heartbeats")
    add("--listen", default=env.get("HEADROOM_LISTEN", "0.0.0.0:9410"), metavar="HOST:PORT")
    stated = "stated, not seen: wins over what plugin and kubelet tell"
    add("--resource", default=env.get("HEADROOM_RESOURCE"), help=stated)
    add("--replicas", type=int, default=env.get("HEADROOM_REPLICAS"), help=stated)
    add("--sharing", choices=get_args(Sharing), default=env.get("HEADROOM_SHARING"), help=stated)
    add("--checkpoint", type=Path, default=env.get("HEADROOM_CHECKPOINT", _CHECKPOINT))
    add("--pod-resources", type=Path, default=env.get("HEADROOM_POD_RESOURCES", _POD_RESOURCES))
    add("--proc", type=Path, default=env.get("HEADROOM_PROC", "/proc"), help="the host's /proc")
    cgroups = env.get("HEADROOM_CGROUPS", "/sys/fs/cgroup")
    add("--cgroups", type=Path, default=cgroups, help="the host's /sys/fs/cgroup")
    add("--dcgm-url", default=env.get("HEADROOM_DCGM_URL", ""), metavar="URL")
    add("--dcgm-interval", type=float, default=10.0, metavar="S", help="seconds between scrapes")
    add("--driver-timeout", type=float, default=10.0, metavar="S", help="of a driver call")
    add("--state", default=env.get("HEADROOM_STATE", ""), metavar="FILE", help="kept over restarts")
    steered = "resources, by comma: the kubelet takes the device that the ledger chose"
    add("--steer", default=env.get("HEADROOM_STEER", ""), metavar="RESOURCE", help=steered)
    add("--once", action="store_true", help="print who uses the GPUs as a table, and end")
    add("--pause", type=float, default=1.0, metavar="S", help="before the sample of --once")
    add("--json", action="store_true", help="print each status as JSON; no cluster, no server")
    add("--no-publish", action="store_true", help="serve metrics only")
    args = parser.parse_args(argv)
    sharing_stated = any((args.resource, args.replicas is not None, args.sharing))
    args.resource = args.resource or "nvidia.com/gpu"
    args.replicas = 1 if args.replicas is None else args.replicas
    args.sharing = args.sharing or "none"
    host, _, port = args.listen.rpartition(":")
    if not args.node and not (args.once or args.json):
        parser.error("no node name: set NODE_NAME or pass --node, for example --node gpu-node-1")
    if not port.isdecimal() or len(port) > 5 or not 0 <= int(port) < 1 << 16:
        parser.error(f"--listen {args.listen!r} is not HOST:PORT; right is, for example, :9410")
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
    steer = tuple(dict.fromkeys(name.strip() for name in args.steer.split(",") if name.strip()))
    for name in steer:
        if not name.removeprefix("nvidia.com/") or not name.startswith("nvidia.com/"):
            parser.error(
                f"--steer {name!r} is no resource of NVIDIA's device plugin; "
                "right is, for example, --steer nvidia.com/gpu"
            )
    if steer and (args.no_publish or args.json):
        parser.error("--steer asks the ledger, so it cannot go with --no-publish or --json")
    return Settings(
        node=args.node,
        namespace=args.namespace,
        interval_s=args.interval,
        heartbeat_s=args.heartbeat,
        host=host,
        port=int(port),
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
        steer=steer,
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
