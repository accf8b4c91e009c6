"""Say what to write in place of one use, or why it has no replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megapg.migrate.bindings import Bindings
from megapg.migrate.facts import Where
from megapg.migrate.uses import Kind
from megapg.upstream.expressions import replacement
from megapg.upstream.mapping import OPTIONAL_FIELDS, RANK_GLOBALS, Argument, Refusal, Replacement


@dataclass(frozen=True)
class Asked:
    """A use to find a replacement for."""

    kind: Kind
    bound: Bindings  # of the name that it uses
    text: str
    versions: Sequence[int]  # minor numbers of Megatron-core that may run the code
    where: Where


def answer_to(asked: Asked, arguments: Sequence[Argument]) -> Replacement | Refusal:
    """Return the replacement of a use; arguments are those of a call."""
    name = asked.bound.member or ""
    if asked.kind is Kind.STRING:
        return Refusal("in-a-string")
    if asked.kind is Kind.ASSIGNED:
        return Refusal("assigned")
    if not asked.bound.only:
        return Refusal("assigned", "the name has several meanings")
    if asked.kind is Kind.MODULE:
        return Refusal("as-value")
    if asked.kind is Kind.VALUE:
        of_name = replacement(name, (), asked.versions)
        is_about_name = isinstance(of_name, Refusal) and of_name.reason != "arguments"
        return of_name if is_about_name else Refusal("as-value")
    if asked.where.in_use:
        return Refusal("arguments", "it is in the arguments of another use")
    if "#" in asked.text and "\n" in asked.text:
        return Refusal("arguments", "it contains a comment")
    answer = replacement(name, arguments, asked.versions)
    field = RANK_GLOBALS.get(name, "")
    is_read = isinstance(answer, Replacement) and field and asked.where.as_list
    if is_read and field not in OPTIONAL_FIELDS:  # None would fail there as well
        assert isinstance(answer, Replacement)
        return replace(answer, caution="")
    return answer
