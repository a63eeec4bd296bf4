"""Is imported last by the fork server: forked commands then share all that is loaded.

Otherwise the first garbage collection of each command visits, and so copies, all loaded modules.
What every command does at its start is done here once.
"""

import gc

from typer.main import get_command

from extender.app import cli
from extender.config.loading import check_settings

vars(cli)["app"] = get_command(cli.app)
check_settings(None, {}, {})
gc.collect()
gc.freeze()
