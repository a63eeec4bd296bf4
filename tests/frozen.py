"""Is imported by the fork server: forked commands then share all that is loaded.

Otherwise the first garbage collection of each command visits, and so copies, all loaded modules.
The imports are a fifth cheaper without collections. What every command does at its start is done
here once.
"""

import gc
from importlib import import_module

from typer.main import get_command

gc.disable()
for name in (
    *("headroom.commands", "headroom.serve.embedded", "headroom.serve.extender_and_console"),
    *("headroom.webhook.process", "agent.sampler", "agent.once_report", "agent.http_endpoints"),
    *("agent.gate_service", "agent.status_writer", "agent.kube_publisher", "pynvml"),
    *("agent.steering.preferred_allocation", "anyio._backends._asyncio"),
    "kubernetes.client.api.core_v1_api",
    "kubernetes.client.api.admissionregistration_v1_api",
):
    import_module(name)

cli = import_module("headroom.commands")
vars(cli)["app"] = get_command(cli.app)
import_module("headroom.runtime.settings.loading").check_settings(None, {}, {})
gc.freeze()
gc.enable()
