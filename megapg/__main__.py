"""``python -m megapg``."""

from megapg.tools.cli import app

app(prog_name="megapg")
