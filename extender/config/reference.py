"""The reference page of all settings, made of what the code says of them: docs/settings.md.

``python -m extender.config.reference`` prints the page and `make docs` writes it. A test fails if
the page is out of date.
"""

import sys
from collections.abc import Iterator
from enum import Enum
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agent.settings import FLAGS, Flag
from extender.config.loading import as_yaml, example_of
from extender.config.settings import EXAMPLES, RELOADED, ScoreWeights, Settings

_HEAD = """\
# Settings

<!-- Made by `make docs` from what the code says: change it there. -->

## The extender

    headroom extender --config headroom.yaml    # console and webhook read the same file
    headroom config check headroom.yaml    # 0: it would start; 2: what is wrong, with its line

Settings come from a YAML file, from variables of the environment and from the command line, and
of each setting the command line comes before its variable, and that before the file. The variable
is `HEADROOM_` and the name in capitals (`HEADROOM_STALE_AFTER_S=60`); a part of a setting comes
after two underscores (`HEADROOM_SCORE_WEIGHTS__SLACK=2`); lists are written with commas. Which
flags there are: `headroom extender --help`.

What is unknown, cannot be read or contradicts itself is refused at the start, with the line of
the file, the variable or the flag, and a right example:

    headroom: headroom.yaml:12: polcy is no setting; right is, perhaps, policy
    headroom: headroom.yaml:3, headroom.yaml:7: debug_open is set and debug_host is 0.0.0.0, ...

Variables by which the kubelet tells pods of their namespace's Services
(`HEADROOM_DEBUG_PORT=tcp://...`) are no settings; `enableServiceLinks: false` in a pod keeps them
out.

### When the file changes

A running extender looks at its file once a second. Settings marked *at once* count from then on,
all others after a restart (`kubectl -n headroom-system rollout restart deployment`): they decide
how nodes were weighed, what is watched and which sockets are open, and half of an answer by the
old ones would be worse than a restart, which costs nobody anything. Of a mounted ConfigMap a
change arrives after a minute or two; one that is mounted by `subPath` never does.

A file that cannot be used changes nothing. The settings that there are go on; that is logged
(`settings_rejected`), counted (`headroom_settings_reloads_total`), and told in `/v1/status` under
`settings.refused` until the file is right. `settings.after_restart` names those that wait for a
restart. Files that settings name (certificates, tokens) are read again by themselves, always.

"""

_AGENT = """\
## The agent

    headroom-agent --interval 5    # or, in a manifest: {name: HEADROOM_INTERVAL, value: "5"}

Flags, and a variable for each that a manifest may want; the flag comes first. All are read at the
start. Other variables that begin with `HEADROOM_` are refused by name. What cannot go together is
refused too: `--replicas` above 1 without `--sharing` and the other way round, `--interval` above
`--heartbeat`, `--driver-timeout` above it, `--device-choice steered` without publishing.

| flag | variable | unit | default | what it decides |
|---|---|---|---|---|
"""

#: In the order of the page; a test holds that each setting is in one.
GROUPS = {
    "What it does": (
        "mode",
        "reject_unannotated",
        "on_miss",
        "evict_for_memory",
        "visible_devices",
        "suspect_env_from",
    ),
    "Which node is best": ("policy", "score_weights", "filter_best_only"),
    "Which GPUs": ("resources", "require_report", "agent_namespace"),
    "How long": (
        "stale_after_s",
        "blind_after_s",
        "bind_deadline_s",
        "orphan_after_s",
        "nomination_hold_s",
        "overuse_after_s",
    ),
    "Where it listens": (
        "host",
        "verbs_host",
        "verbs_port",
        "debug_host",
        "debug_port",
        "debug_open",
        "insecure_verbs",
        "webhook_port",
        "max_body",
    ),
    "TLS ([tls.md](tls.md))": (
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "debug_tls_cert",
        "debug_tls_key",
        "webhook_tls_cert",
        "webhook_tls_key",
    ),
    "Admission webhook ([admission.md](admission.md))": (
        "scheduler_name",
        "gate_image",
        "mirror_vram",
    ),
    "What it tells": (
        "waiting_events_per_s",
        "device_series",
        "journal_decisions",
        "journal_bytes",
        "journal_age_s",
        "extenders",
    ),
    "History of SM activity ([sm-activity.md](sm-activity.md))": (
        "prometheus_url",
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
    return "".join((_HEAD, *_extender(), _AGENT, *map(_knob, FLAGS)))


def _extender() -> Iterator[str]:
    for group, names in GROUPS.items():
        yield f"### {group}\n\n| setting | unit | default | changes count | what it decides |\n"
        yield "|---|---|---|---|---|\n"
        for name in names:
            field = Settings.model_fields[name]
            when = "at once" if name in RELOADED else "after a restart"
            what = (field.description or "").replace("|", "\\|")
            if field.default is None:
                what += f" As in `{example_of((name,))}`."
            cells = f"`{name}`", unit(name, field), _default(name, field), when, what
            yield f"| {' | '.join(cells)} |\n"
        yield "\n"
        if "score_weights" in names:
            parts = ", ".join(f"`{name}`" for name in ScoreWeights.model_fields)
            yield f"The parts of `score_weights` are {parts}: [scores.md](scores.md).\n\n"


def unit(name: str, field: FieldInfo) -> str:
    """What a value is, or in what it is counted."""
    kind = next((each for each in get_args(field.annotation) if each is not NoneType), None)
    kind = field.annotation if kind is None or name in ("resources", "extenders") else kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f"`{each.value}`" for each in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "weights, beside each other"
    for ending, said in (
        ("_per_s", "1/s"),
        ("_s", "s"),
        ("_port", "port"),
        ("_bytes", "bytes, as a quantity"),
        ("body", "bytes, as a quantity"),
        ("_quantile", "0..1"),
        ("_url", "URL"),
        ("host", "address"),
        ("_decisions", "count"),
        ("_series", "count"),
        ("_namespace", "name"),
        ("_name", "name"),
        ("_image", "image"),
        ("resources", "list of names"),
        ("extenders", "list of places"),
    ):
        if name.endswith(ending):
            return said
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


def _knob(knob: Flag) -> str:
    kind = " or ".join(f"`{each}`" for each in knob.choices) if knob.choices else knob.unit
    default = f"`{knob.default}`" if knob.default else "none"
    variable = f"`{knob.env}`" if knob.env else "-"
    what = knob.consequence.replace("|", "\\|")
    return f"| `--{knob.flag}` | {variable} | {kind or 'switch'} | {default} | {what} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
