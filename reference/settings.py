"""The page of all settings of the extender and the agent."""

from collections.abc import Iterator
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agent.settings import FLAGS, Flag
from headroom.runtime.settings.loading import EXAMPLES, as_yaml, example_of
from headroom.runtime.settings.score_weights import ScoreWeights
from headroom.runtime.settings.settings import RELOADED, Settings
from reference.markdown import head

_INTRO = """\
## The extender

    headroom extender --config headroom.yaml    # console and webhook read the same file
    headroom config check headroom.yaml    # 0: valid, with the mode; 2: invalid, with lines

Settings come from YAML files, from environment variables and from the command line. For each
setting, a flag overrides its variable, and the variable overrides the files. If `--config` names a
folder, all its files are read in the order of their names, and a later file overrides an earlier
one. In a cluster, the folder is ConfigMap `headroom-config`: `10-base.yaml` is shipped with
Headroom, overlays and components add files that begin with a digit, and your own `headroom.yaml` is
read last. `headroom extender
--help` lists the flags. Names of variables:

- `HEADROOM_` and the name of the setting in capitals: `HEADROOM_STALE_AFTER_S=60`.
- Two underscores before a part of a setting: `HEADROOM_SCORE_WEIGHTS__SLACK=2`.
- Lists are comma-separated: `HEADROOM_RESOURCES=nvidia.com/gpu,nvidia.com/gpu.shared`.

The extender does not start with settings that are unknown, invalid or contradictory. The error
names the line of the file, the variable or the flag, and gives an example or a fix:

    headroom: headroom.yaml:12: polcy is not a setting; did you mean policy?
    headroom: headroom.yaml:3, headroom.yaml:7: debug_open is set and debug_host is 0.0.0.0, ...

The kubelet sets variables for the Services of a pod's namespace, such as
`HEADROOM_DEBUG_PORT=tcp://...`. Headroom does not read these as settings. To remove them, set
`enableServiceLinks: false` in the pod.

### When the file changes

A running extender checks its files once a second. It applies settings marked *at once*
immediately. All other settings need a restart, because they affect watches, open sockets and
values that are already computed: `kubectl -n headroom-system rollout restart deployment`.

A change to a mounted ConfigMap reaches the extender after a minute or two. A ConfigMap that is
mounted by `subPath` is never updated.

If the new file is invalid, the extender keeps its current settings. It logs `settings_rejected`,
counts the attempt in `headroom_settings_reloads_total`, and lists the problems in `/v1/status`
under `settings.rejected` until the file is valid. `settings.after_restart` lists settings that
wait for a restart. Certificates and tokens that settings name are always reloaded without a
restart.

"""

_AGENT = """\
## The agent

    headroom agent --interval 5    # or, in a manifest: {name: HEADROOM_INTERVAL, value: "5"}

The agent reads flags and environment variables at the start, and a flag overrides its variable.
It does not start with other variables whose names begin with `HEADROOM_`, or with contradictory
flags:

- `--replicas` above 1 without `--sharing`, or `--sharing` without `--replicas` above 1
- `--interval` or `--driver-timeout` above `--heartbeat`
- `--device-choice steered` without publishing

| flag | variable | unit | default | description |
|---|---|---|---|---|
"""

#: Groups in the order of the page. A test checks that each setting is in one group.
GROUPS = {
    "Behavior": (
        "mode",
        "reject_unannotated",
        "on_miss",
        "on_overuse",
        "overuse_opt_out",
        "overuse_margin",
        "overuse_grace_s",
        "preempt_for_memory",
        "evict_for_memory",
        "evict_partial_groups_after_s",
        "visible_devices",
        "suspect_env_from",
    ),
    "Node scoring": ("policy", "score_weights", "filter_best_only"),
    "GPU resources and agents": (
        "resources",
        "largest_devices",
        "require_report",
        "agent_namespace",
    ),
    "Timeouts": (
        "stale_after_s",
        "blind_after_s",
        "bind_deadline_s",
        "orphan_after_s",
        "nomination_hold_s",
        "overuse_after_s",
        "max_startup_timeout_s",
    ),
    "Ports and addresses": (
        "host",
        "verbs_host",
        "verbs_port",
        "debug_host",
        "debug_port",
        "debug_open",
        "metrics_access",
        "insecure_verbs",
        "webhook_port",
        "max_body",
    ),
    "TLS ([tls.md](../how-to/tls.md))": (
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "debug_tls_cert",
        "debug_tls_key",
        "peer_ca",
        "webhook_tls_cert",
        "webhook_tls_key",
    ),
    "Admission webhook ([admission.md](../design/admission.md))": (
        "scheduler_name",
        "gate_image",
        "mirror_vram",
        "count_vram",
    ),
    "Events, metrics and journal": (
        "waiting_events_per_s",
        "device_series",
        "gpu_hour_price",
        "grafana_url",
        "journal_decisions",
        "journal_bytes",
        "journal_age_s",
        "extenders",
    ),
    "SM activity history ([sm-activity.md](../how-to/sm-activity.md))": (
        "prometheus_url",
        "prometheus_matchers",
        "prometheus_window_s",
        "prometheus_quantile",
        "prometheus_refresh_s",
        "prometheus_timeout_s",
        "prometheus_stale_after_s",
        "prometheus_token_file",
        "prometheus_ca",
    ),
}


def page() -> str:
    """Return docs/reference/settings.md."""
    start = head("Settings", "headroom/runtime/settings and agent/settings.py")
    return "".join((start, _INTRO, *_extender(), _AGENT, *map(_flag_row, FLAGS)))


def _extender() -> Iterator[str]:
    for group, names in GROUPS.items():
        yield f"### {group}\n\n| setting | unit | default | change applies | description |\n"
        yield "|---|---|---|---|---|\n"
        for name in names:
            field = Settings.model_fields[name]
            when = "at once" if name in RELOADED else "after a restart"
            what = (field.description or "").replace("|", "\\|")
            if field.default is None:
                what += f" Example: `{example_of((name,))}`."
            cells = f"`{name}`", unit(name, field), _default(name, field), when, what
            yield f"| {' | '.join(cells)} |\n"
        yield "\n"
        if "score_weights" in names:
            parts = ", ".join(f"`{name}`" for name in ScoreWeights.model_fields)
            page = "[scores.md](../concepts/scores.md)"
            yield f"The parts of `score_weights` are {parts}: {page}.\n\n"


def unit(name: str, field: FieldInfo) -> str:
    """Return the unit of a setting's value, or its type."""
    kind = next((each for each in get_args(field.annotation) if each is not NoneType), None)
    if kind is None or get_origin(field.annotation) is tuple:
        kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f"`{each.value}`" for each in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "relative weights"
    for suffix, text in (
        ("_per_s", "1/s"),
        ("_s", "s"),
        ("_port", "port"),
        ("_bytes", "bytes, as a quantity"),
        ("body", "bytes, as a quantity"),
        ("_margin", "bytes, as a quantity"),
        ("_quantile", "0..1"),
        ("_price", "any currency"),
        ("_url", "URL"),
        ("_matchers", "matchers"),
        ("host", "address"),
        ("_decisions", "count"),
        ("_series", "count"),
        ("_namespace", "name"),
        ("_name", "name"),
        ("_image", "image"),
        ("resources", "list of names"),
        ("extenders", "list of addresses"),
        ("largest_devices", "list of devices"),
    ):
        if name.endswith(suffix):
            return text
    if kind is bool:
        return "`true` or `false`"
    return "path"


def _default(name: str, field: FieldInfo) -> str:
    default: Any = field.default
    if default is None:
        return "none"
    if name in ("max_body", "journal_bytes"):
        return f"`{EXAMPLES[name]}`"
    return f"`{as_yaml(default)}`" if default not in ((), "") else "none"


def _flag_row(flag: Flag) -> str:
    kind = " or ".join(f"`{each}`" for each in flag.choices) if flag.choices else flag.unit
    default = f"`{flag.default}`" if flag.default else "none"
    variable = f"`{flag.env}`" if flag.env else "-"
    description = flag.consequence.replace("|", "\\|")
    return f"| `--{flag.flag}` | {variable} | {kind or 'switch'} | {default} | {description} |\n"
