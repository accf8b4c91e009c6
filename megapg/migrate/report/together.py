"""Which rewritten files need each other, so that it is all of them or none."""

from __future__ import annotations

from collections.abc import Sequence

from megapg.migrate.migration import Rewritten


def together(files: Sequence[Rewritten]) -> list[list[Rewritten]]:
    """The files in units: a file is with those that it requires, and with those that require it.

    Args:
        files: by name; units are in the order of their first files.
    """
    unit_of: dict[str, list[Rewritten]] = {file.file: [file] for file in files}
    for file in files:
        for name in sorted(file.requires & unit_of.keys()):
            mine, other = unit_of[file.file], unit_of[name]
            if mine is not other:
                if len(mine) < len(other):
                    mine, other = other, mine
                mine += other
                unit_of |= {each.file: mine for each in other}
    units = {id(unit): unit for unit in unit_of.values()}
    return [sorted(unit, key=lambda file: file.file) for unit in units.values()]
