"""The fork server imports this module, so that forked commands share all loaded modules.

Without ``gc.freeze``, the first garbage collection of each command would visit all loaded modules,
and thereby copy their memory. Imports without garbage collection take a fifth less CPU. Code that
every command runs at its start runs here once.
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
