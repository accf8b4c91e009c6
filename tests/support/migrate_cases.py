"""The codemod's cases, which are text: ``cases/TOPIC.diff`` has one under each ``=== heading``, and
``cases/programs.txt`` what tests run before and after a migration.
"""

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "codemod" / "cases"


@cache
def cases(topic: str) -> dict[str, str]:
    """heading -> what is below it."""
    (file,) = _FOLDER.glob(f"{topic}.*")
    parts = re.split(r"^=== (.*)\n", file.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


PROGRAMS = cases("programs")


def program_of(package: str) -> dict[str, str]:
    """file -> text, of a program of several files, whose headings are ``PACKAGE FILE``."""
    named = {tuple(heading.split()): text for heading, text in PROGRAMS.items()}
    return {name[1]: text for name, text in named.items() if name[0] == package and name[1:]}
