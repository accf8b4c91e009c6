"""``python -m megapg``."""

from megapg.cli import app

app(prog_name="megapg")
