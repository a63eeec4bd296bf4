"""``python -m extender`` is ``headroom``."""

from extender.app.cli import app

app()
