"""The findings about ``megapg migrate`` as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks import ground_truth, race
from benchmarks.ground_truth import Score
from benchmarks.migrate import AUTOMATIC_TARGET, SHIMLESS_TARGET, Outcome, Uses
from benchmarks.race import Race
from benchmarks.table import Table
from megapg.migrate.migration import How


def corpora_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """What is served, what is left and why, and whether it is right."""
    return [make(outcomes) for make in (_verdicts, _served, _roots, _left, _checks)]


def score_tables(score: Score) -> list[Table]:
    """How far the choices agree with NVIDIA's, and where they don't."""
    return [_agreement(score), _disagreements(score)]


def race_table(races: Sequence[Race]) -> Table:
    """CPU time against LibCST."""
    return Table(
        f"CPU time: the dry run of megapg migrate against {race.LIBCST} with qualified names",
        ("", "files", "ratio", "each repeat", "wanted", "", "seconds (noise)"),
        tuple(
            (
                each.what,
                f"{each.files:,}",
                f"1/{1 / each.ratio:.1f}",
                ", ".join(f"1/{1 / ratio:.1f}" for ratio in each.ratios),
                f"at most 1/{1 / race.TARGET:.0f}",
                "met" if each.met else "MISSED",
                f"{min(each.ours):.2f} / {min(each.theirs):.2f}",
            )
            for each in races
        ),
        (
            "Ours is the whole command, from the start of the interpreter to the last line of the "
            "diff. LibCST's is parsing, and the qualified name of every call and attribute: what "
            "a codemod has to know first. Both read the same files, in turns; CPU time is user "
            "and system, of the process and of those that it starts.",
        ),
    )


# -- corpora ---------------------------------------------------------------------------------------


def _verdicts(outcomes: Sequence[Outcome]) -> Table:
    every = Uses.together([outcome.source for outcome in outcomes])
    wrong = sum(
        len(outcome.unparsed) + len(outcome.not_undone) + len(outcome.uncompiled)
        for outcome in outcomes
    )
    outside = sum(outcome.bytes_outside for outcome in outcomes)
    again = sum(outcome.second_run for outcome in outcomes)
    by_model = every.served[How.MODEL] / (every.total or 1)
    return Table(
        f"megapg migrate on {len(outcomes)} published trees, all together",
        ("", "found", "wanted", ""),
        (
            _share(
                f"of {every.total:,} uses in source: rewritten", every.automatic, AUTOMATIC_TARGET
            ),
            ("of those that a collection could answer", _percent(every.answerable), "-", "-"),
            _share("of them all: rewritten, and not by resolve()", every.shimless, SHIMLESS_TARGET),
            (
                "the same without those that ask a model",
                _percent(every.shimless_or_model),
                "-",
                "-",
            ),
            _none("changed files that don't parse, compile or undo", wrong),
            _none("bytes changed outside of the listed edits", outside),
            _none("edits of a second run", again),
            _none("functions and classes that mix carriers", sum(len(e.mixed) for e in outcomes)),
        ),
        (
            "Rewritten is what is written without --unsafe. A collection could answer all but what "
            "makes, ends or fakes groups, what this core does not have, or keep in a group, "
            "and the branch for where there is no collection. Tests are left out: what lies in a "
            "folder named tests, test_*.py and conftest.py. A use counts as not by resolve() where "
            "neither it nor a function that hands the collection to it turns to the globals when "
            f"nothing is passed. {_percent(by_model)} ask a model: groups_of(model) answers with "
            "what the model carries, and where it carries nothing it falls back on the globals "
            "too, with a warning. Whether a model carries a collection shows at run time only, so "
            "the third row leaves them all out. An attribute or a parameter that may be None is "
            "asked through groups_of() as well, and counts as a collection.",
        ),
    )


def _share(what: str, found: float, wanted: float) -> tuple[str, ...]:
    verdict = "met" if found >= wanted else "MISSED"
    return what, _percent(found), f"at least {_percent(wanted)}", verdict


def _none(what: str, found: int) -> tuple[str, ...]:
    return what, f"{found:,}", "0", "MISSED" if found else "met"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")


def _served(outcomes: Sequence[Outcome]) -> Table:
    rows = [
        (f"{each.corpus.name}, as of {each.corpus.core or 'what it says'}", each.source)
        for each in outcomes
    ]
    rows.append(("all", Uses.together([each.source for each in outcomes])))
    return Table(
        "Uses of the globals in source, by what serves them after the migration",
        ("", "uses", *How, "left", "rewritten", "not by resolve()", "roots"),
        tuple(
            (
                what,
                f"{uses.total:,}",
                *(f"{uses.served[how]:,}" for how in How),
                f"{uses.left.total():,}",
                _percent(uses.automatic),
                _percent(uses.shimless),
                f"{uses.roots:,}",
            )
            for what, uses in rows
        ),
        (
            "collection: one that was in scope. model: groups_of(model). threaded: a "
            "parameter that every caller passes. resolved: resolve(), which takes what was "
            "passed, else the globals. Roots are the functions that turn to the globals then. "
            "As of: the Megatron-core that a tree is read as being written for.",
        ),
    )


def _roots(outcomes: Sequence[Outcome]) -> Table:
    every = Uses.together([each.source for each in outcomes])
    return Table(
        "Uses that may end at the globals, by why nobody passes a collection",
        ("", *(each.corpus.wheel.project for each in outcomes), "all"),
        tuple(
            (why, *(f"{each.source.whys[why]:,}" for each in outcomes), f"{count:,}")
            for why, count in sorted(every.whys.items(), key=lambda row: (-row[1], row[0]))
        ),
        ('"It" is the function that asks, or the last of those that call it.',),
    )


def _left(outcomes: Sequence[Outcome]) -> Table:
    every = Uses.together([each.source for each in outcomes])
    return Table(
        "Uses that are left in source, by reason",
        ("", *(each.corpus.wheel.project for each in outcomes), "all"),
        tuple(
            (
                reason,
                *(f"{each.source.left[reason]:,}" for each in outcomes),
                f"{count:,}",
            )
            for reason, count in sorted(every.left.items(), key=lambda row: (-row[1], row[0]))
        ),
        ("`megapg explain REASON` says what each means, and what to do about it.",),
    )


def _checks(outcomes: Sequence[Outcome]) -> Table:
    problems = [f"{each.corpus.name}: {problem}" for each in outcomes for problem in each.problems]
    wrong = [
        f"{each.corpus.name}: {file} {what}"
        for each in outcomes
        for what, files in (
            ("does not parse", each.unparsed),
            ("can't be undone", each.not_undone),
            ("does not compile", each.uncompiled),
            ("mixes carriers", each.mixed),
        )
        for file in files
    ]
    return Table(
        "What was written, looked at from outside",
        (
            "",
            "files",
            "changed",
            "of these parse",
            "undo",
            "bytes outside of edits",
            "no longer compile",
            "edits of a second run",
            "CPU s (noise)",
            "files/s",
        ),
        tuple(
            (
                each.corpus.name,
                f"{each.files:,}",
                f"{each.changed:,}",
                _of(each.changed - len(each.unparsed), each.changed),
                _of(each.changed - len(each.not_undone), each.changed),
                f"{each.bytes_outside:,}",
                f"{len(each.uncompiled):,}",
                f"{each.second_run:,}",
                f"{each.cpu:.1f}",
                f"{each.files / each.cpu:,.0f}",
            )
            for each in outcomes
        ),
        (
            "Tests included. Undo: the verifier passes what is on disk, and taking the listed "
            "edits back gives the bytes of before. Compiling looks at the whole tree. CPU time is "
            "that of the dry run in this process.",
            *(f"Reported by the tool: {problem}." for problem in problems),
            *wrong,
        ),
    )


def _of(good: int, every: int) -> str:
    return _percent(good / every) if every else "-"


# -- ground truth ----------------------------------------------------------------------------------


def _agreement(score: Score) -> Table:
    field, carrier = ground_truth.FIELD_TARGET, ground_truth.CARRIER_TARGET
    one = sum(choice.one_field for choice in score.scored)
    refused = ", ".join(f"{count} {why}" for why, count in score.refused.most_common())
    return Table(
        "NVIDIA's own migration of Megatron-core, 0.11 to 0.19: do the choices agree?",
        ("", "choices", "agree", "wanted", ""),
        (
            ("field", f"{len(score.scored)}", *_share("", score.same_field, field)[1:]),
            (
                "field, with what NVIDIA changed at the same time",
                f"{len(score.visible)}",
                _percent(score.same_field_of_all),
                "-",
                "-",
            ),
            ("carrier", f"{len(score.carried)}", *_share("", score.same_carrier, carrier)[1:]),
            (
                "carrier, where a parameter is one whether group or collection",
                f"{len(score.carried)}",
                _percent(score.same_place),
                "-",
                "-",
            ),
        ),
        (
            f"{len(score.choices)} reads of the globals that NVIDIA removed from {score.functions} "
            f"functions (an earlier count by hand found {ground_truth.CENSUS}). Field: what the "
            "mapping for the older release reads is among the fields that the new body uses; in "
            f"{one} of the {len(score.scored)} the new body uses only one, or one name for one. "
            "Carrier: what megapg migrate makes of the older release comes from the same sort of "
            "place. Text is not compared.",
            f"Not scored: {score.invisible} where the new body hands a whole collection on, "
            f"{score.fieldless} that ask for no field, {score.refused.total()} refused"
            f"{f' ({refused})' if refused else ''}, and what NVIDIA changed, listed below. Of "
            f"the scored fields {score.unmigrated} are in uses that the migration leaves, which "
            "have no carrier.",
        ),
    )


def _disagreements(score: Score) -> Table:
    rows: dict[tuple[str, ...], Counter[str]] = {}
    for about, choice in score.disagreements():
        carrier = about == "carrier"
        row = (
            f"{about}: {choice.file.removeprefix('megatron/')} {choice.function}",
            f"{choice.older} to {choice.newer}",
            _joined(choice.carriers if carrier else choice.fields),
            _joined(choice.their_carriers if carrier else choice.their_fields),
            choice.changed or "-",
        )
        rows.setdefault(row, Counter())[choice.getter] += 1
    return Table(
        "Where they don't agree, and what is left out",
        ("", "releases", "reads", "getters", "ours", "NVIDIA's", "because"),
        tuple(
            (
                where,
                releases,
                f"{getters.total()}",
                ", ".join(f"`{getter}`" for getter in getters),
                *rest,
            )
            for (where, releases, *rest), getters in rows.items()
        ),
    )


def _joined(several: frozenset[str]) -> str:
    return "; ".join(sorted(several))
