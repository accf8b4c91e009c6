"""Find the settings with which ranks came that must be equal, and say which ranks have which."""

from __future__ import annotations

from collections.abc import Mapping

from megapg.rendezvous.error_texts import RankNames
from megapg.rendezvous.hello import Hello


def differences_in(hellos: Mapping[int, Hello]) -> dict[str, dict[int, str]]:
    """Return setting -> {rank: value} for every setting that differs between ranks."""
    # Keep the given order: settings that depend on others come after them.
    names = dict.fromkeys(name for hello in hellos.values() for name in hello.settings or {})
    found = {}
    for name in names:
        values = {r: (h.settings or {}).get(name, "not set") for r, h in hellos.items()}
        if len(set(values.values())) > 1:
            found[name] = values
    return found


def text_of(name: str, differences: Mapping[str, Mapping[int, str]], names: RankNames) -> str:
    """Return the error: each setting that differs, with its values and their ranks."""
    lines = []
    for setting, values in differences.items():
        by_value: dict[str, list[int]] = {}
        for rank, value in values.items():
            by_value.setdefault(value, []).append(rank)
        said = [f"{value} on {names.several(ranks)}" for value, ranks in by_value.items()]
        lines.append(f"{setting} is {'; '.join(said)}")
    return (
        f"{name!r}: the ranks came with different settings: {'. '.join(lines)}. Give every rank "
        "the same arguments."
    )
