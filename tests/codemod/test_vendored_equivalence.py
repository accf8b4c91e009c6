"""Test that the vendored functions give the same results as the getters that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

import equivalence
import pytest
from equivalence import Question, Tally
from vendored import copied

from megapg import ProcessGroupCollection as Session
from megapg.upstream.mapping import Takes


def passed(pg: object) -> Any:
    """Return a vendored view; a session's groups are put into Megatron-core's collection first."""
    if isinstance(pg, Session):
        core = type("ProcessGroupCollection", (), {})()
        vars(core).update(
            {name: list(v) if isinstance(v, tuple) else v for name, v in vars(pg).items()}
        )
        return copied().resolve(core)
    return copied().resolve(pg)


class OfPassed(Tally):
    """A tally without questions about the whole job, which a session's groups can't answer."""

    def compare(self, question: Question, kind: str, *rest: Any, **more: Any) -> None:
        if kind != "session" or question.written.takes not in (Takes.JOB, Takes.GLOBALS):
            super().compare(question, kind, *rest, **more)


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    asked = equivalence.asked

    def of_view(code: CodeType, pg: object = None) -> object:
        return asked(code, passed(pg))  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        # Every rank is compared in tests/upstream: two ranks of each grid are enough for a copy.
        grids = {grid: list(ranks)[-2:] for grid, ranks in equivalence.GRIDS.items()}
        patch.setattr(equivalence, "GRIDS", grids)
        patch.setattr(equivalence, "Tally", OfPassed)
        patch.setattr(equivalence, "getters", copied())
        patch.setattr(equivalence, "GlobalGroups", copied().resolve)
        patch.setattr(equivalence, "REFUSALS", (*equivalence.REFUSALS, ValueError))
        patch.setattr(equivalence, "asked", of_view)
        yield equivalence.prove()


@pytest.mark.contract
def test_everything_written_answers_as_the_getter(tally: Tally) -> None:
    print(
        f"{tally.version}: {tally.comparisons} comparisons",
        tally.answered,
        tally.raised,
        tally.refused,
    )
    assert tally.mismatches[:20] == []
    assert tally.unanswered == set()
    # Comparisons in which both sides raise prove little.
    assert tally.raised + tally.refused < tally.comparisons / 8
