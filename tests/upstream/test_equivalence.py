"""Compare the codemod's replacements with the getters, in every mapped form.

The comparison is in equivalence.py. It runs on the installed core, and in another process on
Megatron-core 0.12.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import equivalence
import pytest
from configurations import Configuration
from equivalence import MINOR, Tally, compare_on, prove, questions
from megatron.core import parallel_state
from old_core import ROOT, VERSION, run_on_old_core

from megapg.ownership.opening import fake_session
from megapg.upstream.mapping import OPTIONAL_FIELDS, RANK_GLOBALS, Replacement
from megapg.upstream.signatures import functions

# Minimum number of comparisons by minor version, so that the proof cannot become empty.
LEAST = {12: 105_000, 16: 150_000, 19: 205_000}

NEVER_MAPPED = (
    "(set|create|destroy|initialize|overwrite|generate|default|update)_|RankGenerator"
    "|get_(virtual_pipeline_model_parallel_rank|nccl_options|moe_|global_symmetric_)"
)

# Names that are replaced without a caution if the code only reads them.
LISTS_OF_RANKS = {name for name, of in RANK_GLOBALS.items() if of not in OPTIONAL_FIELDS}

HIERARCHICAL = Configuration(
    world_size=16, tp=2, cp=4, hierarchical_cp=(2, 2), optimizer_instances=2
)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return prove()


@pytest.mark.contract
def test_everything_written_answers_as_the_getter(tally: Tally) -> None:
    print(f"{tally.version}: {tally.comparisons} comparisons of {tally.questions} reads")
    assert tally.mismatches == []
    assert tally.comparisons >= LEAST.get(MINOR, 100_000)


@pytest.mark.contract
def test_every_mapped_name_gave_an_answer_and_every_stand_in_was_asked(tally: Tally) -> None:
    assert tally.unanswered == set()
    answered = tally.answered
    assert min(answered[kind] for kind in ("globals", "session", "needs alone")) > 15_000
    assert answered["nothing passed"] > 100
    # Errors on both sides prove little, and a refusal is only for what no field can hold.
    assert tally.raised < tally.comparisons / 8
    assert tally.refused < tally.comparisons / 50
    # Every function is compared, unless the table refuses it for all arguments.
    refused = set(functions(MINOR)) - {question.name for question in questions()}
    assert [name for name in refused if not re.match(NEVER_MAPPED, name)] == []


@pytest.mark.contract
def test_lists_of_ranks_that_are_read_are_there_with_the_groups(tally: Tally) -> None:
    held = {*vars(parallel_state)} & LISTS_OF_RANKS
    assert len(held) >= 6
    assert held <= tally.names  # each was compared as a list
    assert not held & tally.empty


@pytest.mark.contract
def test_a_wrong_field_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put another field, which differs on this grid, into every expression."""
    grid, rank = Configuration(world_size=16, tp=2, cp=2, pp=2, ep=4, expt_tp=1), 13
    with fake_session(grid.layout(), rank) as session:
        pg = session.groups
        held = [field for field in pg.present() if field != "hcp" and getattr(pg, field)]
        places = {field: (pg.rank(field), pg.ranks(field)) for field in held}
    real, damaged = equivalence.replacement, set()

    def other(field: str) -> str | None:
        """Return a field with another rank, size and first rank."""
        if field not in places:
            return None
        mine, ranks = places[field]
        return next(
            (
                name
                for name, (index, others) in places.items()
                if index != mine and len(others) != len(ranks) and others[0] != ranks[0]
            ),
            None,
        )

    def wrong(name, arguments, versions):
        found = real(name, arguments, versions)
        if not isinstance(found, Replacement) or not (instead := other(found.field)):
            return found
        template = re.sub(rf'(\$pg\.|"){found.field}\b', rf"\g<1>{instead}", found.template)
        if template != found.template:
            damaged.add(name)
        return replace(found, template=template, needs=(*found.needs, instead))

    monkeypatch.setattr(equivalence, "replacement", wrong)
    asking, tally = questions(), Tally()
    compare_on(tally, asking, grid, rank)
    caught = {re.search(r": (\w+)", mismatch)[1] for mismatch in tally.mismatches}
    assert len(damaged) > 40
    assert damaged - caught == set()


@pytest.mark.contract
def test_a_field_left_out_of_needs_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, damaged = equivalence.replacement, set()

    def forgetful(name, arguments, versions):
        found = real(name, arguments, versions)
        if isinstance(found, Replacement) and found.takes == "collection" and found.needs:
            damaged.add(name)
            return replace(found, needs=found.needs[1:])
        return found

    grid, sound, tally = HIERARCHICAL, Tally(), Tally()
    compare_on(sound, questions(), grid, 13)
    monkeypatch.setattr(equivalence, "replacement", forgetful)
    compare_on(tally, questions(), grid, 13)
    caught = {re.search(r"needs alone: (\w+)", each)[1] for each in tally.mismatches}
    assert len(damaged & sound.names) > 40
    # This name is false with and without the field.
    assert (damaged & sound.names) - caught <= {"has_separate_all_gather_group"}


def test_it_holds_on_the_old_core_too() -> None:
    printed = run_on_old_core(ROOT / "tests" / "support" / "equivalence.py")
    numbers = json.loads(printed.splitlines()[-1])
    print(numbers)
    assert numbers["version"] == VERSION
    assert numbers["mismatches"] == []
    assert numbers["unanswered"] == []
    assert not LISTS_OF_RANKS & {*numbers["empty"]}
    assert numbers["answered"]["or several"] > 100  # ranks in several pipelines, and other ranks
    assert numbers["comparisons"] >= LEAST[12]
