"""All settings of the extender, with their descriptions and defaults."""

from enum import Enum
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from headroom.contract.annotations import (
    COUNTED_VRAM,
    MAX_STARTUP_TIMEOUT_S,
    MIRROR,
    OnOveruse,
    ScoringPolicy,
)
from headroom.core.journal.decision_records import DEFAULT_BOUNDS, Bounds
from headroom.core.placement.policy import MIB, Rules, VisibleDevices
from headroom.runtime.promql import Queries
from headroom.runtime.settings.constraints import (
    PORT_RULES,
    Addresses,
    LargestDevices,
    LinkTemplate,
    Matchers,
    QuantityBytes,
    Url,
    largest_device,
    peers_need_a_ca,
    prometheus_needs_url,
)
from headroom.runtime.settings.ports import PortSettings
from headroom.runtime.settings.score_weights import ScoreWeights
from headroom.runtime.settings.webhook import WebhookSettings


class Mode(Enum):
    ENFORCE = "enforce"
    OBSERVE = "observe"


#: Settings that a running process applies when the file changes. All other settings require a
#: restart.
RELOADED = (
    "mode",
    "reject_unannotated",
    "policy",
    "score_weights",
    "on_miss",
    "on_overuse",
    "overuse_opt_out",
    "overuse_margin",
    "overuse_grace_s",
    "max_startup_timeout_s",
    "preempt_for_memory",
    "evict_partial_groups_after_s",
    "orphan_after_s",
    "waiting_events_per_s",
)


class OnMiss(Enum):
    REPORT = "report"
    EVICT = "evict"


class Settings(PortSettings):
    """All settings. ``runtime.settings.loading`` reads them.

    An unknown setting is an error, because otherwise a misspelled name would have no effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = Field(
        Mode.ENFORCE,
        description="enforce, or observe. In mode observe, Headroom only records and counts its "
        "decisions. It rejects, prefers and evicts nothing and writes no Events, so "
        "kube-scheduler decides alone: docs/get-started/rollout.md.",
    )
    max_body: QuantityBytes = Field(
        16 * MIB,
        description="Maximum body size of a scheduler call. With nodeCacheCapable: true, 5,000 "
        "nodes need 100 kB; with false, each node needs 9 kB. The limit also applies to the "
        "admission webhook, where an object and its previous version need at most 6 MiB.",
    )
    scheduler_name: str = Field(
        "headroom",
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        max_length=253,
        description="Name of the scheduler that calls this extender. The webhook sets it on GPU "
        "pods that name no scheduler, unless the label headroom.gpu/scheduler of their namespace "
        "names another one. default-scheduler: the webhook changes no scheduler.",
    )
    gate_image: str = Field(
        "",
        max_length=1000,
        description="Image of the gate that the webhook adds to pods for gated nodes: the agent's "
        "image, with its tag or digest. If it is empty, pods get no gate and gated nodes take no "
        "pods. If the tag or digest changes, existing pods keep their gate.",
    )
    mirror_vram: bool = Field(
        False,
        description="Publish memory as extended resource headroom.gpu/vram, in MiB. The webhook "
        "adds it to pods. The extender adds it to the capacity of nodes, which requires the "
        "permissions of deploy/components/in-tree-mirror.",
    )
    count_vram: bool = Field(
        False,
        description="The webhook adds extended resource headroom.gpu/vram-bytes to pods, so that "
        "ResourceQuotas count their memory. No node offers it: kube-scheduler must ignore it, as "
        "in deploy/base/kube-scheduler.yaml.",
    )
    largest_devices: LargestDevices = Field(
        (),
        description="The largest device of each resource, as RESOURCE=MEMORY, or as "
        "RESOURCE=MEMORY/REPLICAS if it is shared. Larger devices, and devices with more memory "
        "for each replica, take no pods. If a pod requests a share or no amount, quotas count its "
        "memory as on this device. Without this setting, they count it as on the largest device "
        "that any agent reports.",
    )
    resources: tuple[str, ...] = Field(
        Rules().resources,
        min_length=1,
        description="Extended resources that are GPUs; a trailing * matches any suffix.",
    )
    reject_unannotated: bool = Field(
        False, description="Reject pods that request a GPU but no amount of its memory."
    )
    require_report: bool = Field(
        True,
        description="Require an agent's report for nodes with shared GPUs. If it is false, the "
        "node's labels are enough. Unshared GPUs never need a report. Without a report, no memory "
        "use is measured.",
    )
    policy: ScoringPolicy = Field(
        ScoringPolicy.FRAGMENTATION, description="Scoring policy of pods that choose none."
    )
    score_weights: ScoreWeights = Field(
        ScoreWeights(), description="Relative weight of each term of a score; not all 0."
    )
    filter_best_only: bool = Field(
        False,
        description="Filter returns only the best node, unless a preference of the user could "
        "favor another node. kube-scheduler then skips scoring. Do not set it if another extender "
        "filters after this one, or if other scoring plugins should outweigh Headroom's choice: "
        "docs/how-to/kube-scheduler.md.",
    )
    on_miss: OnMiss = Field(
        OnMiss.REPORT,
        description="Action for a pod on a device without enough free memory for it: report, or "
        "evict the pod if it is new, uses no memory yet and has a controller. A pod that still "
        "waits at its gate is always evicted.",
    )
    on_overuse: OnOveruse = Field(
        OnOveruse.REPORT,
        description="Action for a pod that uses more memory than it reserved: report, or evict the "
        "pod if other pods on the device lack memory that they reserved, or less than "
        "overuse_margin is free. A pod can set annotation headroom.gpu/on-overuse: evict for "
        "itself.",
    )
    overuse_opt_out: bool = Field(
        False,
        description="Whether a pod with annotation headroom.gpu/on-overuse: report is exempt from "
        "eviction if on_overuse is evict.",
    )
    overuse_margin: QuantityBytes = Field(
        256 * MIB,
        description="Free memory of a device below which pods are evicted for overuse even if the "
        "other pods have all memory that they reserved.",
    )
    overuse_grace_s: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Time from the Event that warns of an eviction for overuse to the eviction. A "
        "newer sample of the agent must confirm that memory is still missing.",
    )
    max_startup_timeout_s: int = Field(
        Rules().max_startup_timeout_s,
        ge=1,
        le=MAX_STARTUP_TIMEOUT_S,
        description="Maximum time in seconds for which a pod with annotation headroom.gpu/startup: "
        "alone keeps other such pods from its device while it starts. It limits annotation "
        "headroom.gpu/startup-timeout.",
    )
    visible_devices: VisibleDevices = Field(
        VisibleDevices.REJECT,
        description="Action for a pod that sets NVIDIA_VISIBLE_DEVICES itself, on a node where the "
        "variable may take effect: reject the pod, or charge it on every device of the node.",
    )
    suspect_env_from: bool = Field(
        False,
        description="Treat a container with envFrom as if it sets NVIDIA_VISIBLE_DEVICES, unless "
        "its own env or a prefix excludes that. The extender does not read the ConfigMaps and "
        "Secrets.",
    )
    stale_after_s: float = Field(
        90.0,
        gt=0,
        description="A node without a report or heartbeat for this time takes no new pods. If you "
        "set more than 90 and steer nodes, agents need the same value as HEADROOM_STALE_AFTER, and "
        "60 s more as terminationGracePeriodSeconds. The chart sets both.",
    )
    blind_after_s: float = Field(
        90.0,
        gt=70,
        description="If the API server sends nothing about one kind of object for this time, the "
        "extender makes no decisions. The API server sends something every 60 s even if nothing "
        "changes.",
    )
    nomination_hold_s: float = Field(
        60.0,
        ge=5,
        le=3600,
        description="After a preemption, memory on the node stays reserved for the pending pod "
        "until this long after the last evicted pod has left. Then other pods may use it.",
    )
    evict_for_memory: bool = Field(
        False,
        description="Evict pods with lower priority for a pod that only GPU memory keeps from a "
        "node, if kube-scheduler does not consider preemption there. Evictions never violate a "
        "PodDisruptionBudget. If it is false, only kube-scheduler preempts.",
    )
    preempt_for_memory: bool = Field(
        False,
        description="Let kube-scheduler 1.38 or newer preempt pods with lower priority for a pod "
        "that only GPU memory keeps from a node. Leave it false for older versions of "
        "kube-scheduler, which cannot do this.",
    )
    evict_partial_groups_after_s: float | None = Field(
        None,
        ge=10,
        le=86_400,
        description="Evict the bound pods of a group together if fewer pods are bound than its "
        "PodGroup needs, others wait, and no further pod was bound for this time. If it is not "
        "set, no pod is evicted: docs/how-to/gangs.md.",
    )
    orphan_after_s: float = Field(
        60.0,
        gt=0,
        description="Age at which a reservation without a bound pod is checked for removal.",
    )
    bind_deadline_s: float = Field(
        4.0,
        gt=0,
        le=60,
        description="Maximum time in which a bind is retried with newer data. Set it below "
        "httpTimeout of kube-scheduler's extender entry, after which kube-scheduler cancels the "
        "bind.",
    )
    overuse_after_s: float = Field(
        Rules().overuse_after_s,
        ge=0,
        description="A pod is reported after it has used more memory than it requested for this "
        "time.",
    )
    gpu_hour_price: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Price of one hour of a whole GPU, from which /v1/idle and /v1/costs compute "
        "costs. If it is not set, no costs are shown.",
    )
    waiting_events_per_s: int = Field(
        10,
        ge=0,
        le=1000,
        description="Maximum number of Events per second that explain why pods wait. Each pod's "
        "Event is updated at most once a minute, and only if its text changes. 0: no such Events.",
    )
    device_series: int = Field(
        2000,
        ge=0,
        le=100_000,
        description="Maximum number of devices with their own series in /metrics, in the order of "
        "node names; headroom_ledger_devices_left_out counts the others. 0: sums only.",
    )
    agent_namespace: str = Field(
        "headroom-system", description="Namespace of the agents' heartbeat Leases."
    )
    journal_decisions: int = Field(
        DEFAULT_BOUNDS.decisions,
        ge=1,
        description="Number of latest decisions that the journal keeps for the debug API.",
    )
    journal_bytes: QuantityBytes = Field(
        DEFAULT_BOUNDS.size_bytes,
        description="Maximum memory of the journal. A decision takes 1 to 3 KiB.",
    )
    journal_age_s: float = Field(
        DEFAULT_BOUNDS.age_s, gt=0, description="Maximum age of a decision in the journal."
    )
    extenders: Addresses = Field(
        (),
        description="Extenders whose journals the console follows: host names or IP addresses, "
        "each with a port unless it is debug_port. The name of a headless Service stands for all "
        "its addresses. A process does not follow itself.",
    )
    grafana_url: LinkTemplate | None = Field(
        None,
        description="URL of your own dashboard, to which the page links from nodes, GPUs "
        "and pods. Its query may contain {node}, {uuid} (of the GPU), {namespace}, {pod}, "
        "{from_ms} and {to_ms} (the last hour). The page leaves out parameters that have no value.",
    )
    prometheus_url: Url | None = Field(
        None,
        repr=False,
        description="URL of the Prometheus that scrapes dcgm-exporter. The usual SM activity of "
        "devices is read from it. Without it, the agents' samples are used. The recorder reads "
        "from it the lives of containers before its own start.",
    )
    prometheus_matchers: Matchers | None = Field(
        None,
        description="Label matchers of this cluster's series, written as between the braces of a "
        "PromQL selector. They are added to every query. Set them if prometheus_url has several "
        "clusters.",
    )
    prometheus_window_s: float = Field(
        900.0, ge=60, le=86_400, description="Length of the SM activity history that is used."
    )
    prometheus_quantile: float = Field(
        0.95, ge=0, le=1, description="Quantile of SM activity over the window; 1 is the maximum."
    )
    prometheus_refresh_s: float = Field(
        60.0, ge=1, description="Time between two refreshes. Each queries the whole fleet."
    )
    prometheus_timeout_s: float = Field(
        15.0, gt=0, description="Maximum time for all queries of one refresh."
    )
    prometheus_stale_after_s: float = Field(
        180.0,
        gt=0,
        description="Maximum age of a device's newest sample in Prometheus. If it is older, the "
        "agent's sample is used.",
    )
    prometheus_token_file: Path | None = Field(
        None, description="File with a bearer token for Prometheus. It is read before each query."
    )
    prometheus_ca: Path | None = Field(
        None, description="PEM file with CA certificates for Prometheus. Default: the system's CAs."
    )

    @field_validator("resources")
    @classmethod
    def _mirror_is_no_gpu(cls, resources: tuple[str, ...]) -> tuple[str, ...]:
        for name in filter(Rules(resources=resources).manages, (MIRROR, COUNTED_VRAM)):
            raise ValueError(
                f"the pattern matches {name}, which the webhook adds to pods so that other tools "
                "can count memory; as a GPU resource it would be charged twice. "
                "Example: nvidia.com/gpu"
            )
        return resources

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needing_url = self.prometheus_token_file, self.prometheus_ca, self.prometheus_matchers
        prometheus_needs_url(self.prometheus_url, *needing_url)
        for rule in PORT_RULES:
            rule(self)
        peers_need_a_ca(self, self.extenders)
        return self

    @property
    def webhook(self) -> WebhookSettings:
        observes = self.mode is Mode.OBSERVE
        return WebhookSettings(
            self.scheduler_name, self.gate_image, self.mirror_vram, observes, self.count_vram
        )

    @property
    def queries(self) -> Queries:
        return Queries(self.prometheus_matchers or "", self.resources)

    @property
    def journal(self) -> Bounds:
        return Bounds(self.journal_decisions, self.journal_bytes, self.journal_age_s)

    @property
    def rules(self) -> Rules:
        return Rules(
            resources=self.resources,
            largest_devices=tuple(map(largest_device, self.largest_devices)),
            reject_unannotated=self.reject_unannotated,
            require_report=self.require_report,
            gate_image=self.gate_image,
            overuse_after_s=self.overuse_after_s,
            nomination_hold_s=self.nomination_hold_s,
            evict_for_memory=self.evict_for_memory,
            evict_misses=self.on_miss is OnMiss.EVICT,
            evict_overuse=self.on_overuse is OnOveruse.EVICT,
            overuse_opt_out=self.overuse_opt_out,
            overuse_margin_bytes=self.overuse_margin,
            max_startup_timeout_s=self.max_startup_timeout_s,
            policy=self.policy,
            weights=self.score_weights.rules,
            visible_devices=self.visible_devices,
            suspect_env_from=self.suspect_env_from,
        )
