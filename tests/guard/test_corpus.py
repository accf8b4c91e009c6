"""Every program of the corpus: wrong programs raise with the guard, sound programs do not.

A program is one file, and no other file names it. Its docstring is one line that describes the
error or the program. Its constants:

* ``WORLD``: number of ranks; 2 by default, and 0 for a process without torch.distributed.
* ``LAYOUTS``: the sizes of the globals and of sessions, in the order in which they are opened. The
  functions are called with the collections of the sessions.
* ``CORES``: the versions of Megatron-core that it is for, as ``("0.16", "0.17")``; all by default.
* ``WITHOUT_KIT``: True if it runs outside of ``megatron_on_cpu()``.

A program in ``wrong/`` has the user's function ``program()``, and ``meant()``, which uses the
groups that the user meant. If there is no ``meant()``, the user meant the groups of the first
session: they are published, and passed in place of each session's. Both return plain values, which
differ on at least one rank without the guard. ``READER`` is the function that reads the globals.
``GIVEN`` is the function that got other groups; ``program`` by default, and empty if no function
on the stack did. ``RANKS`` lists the ranks that read; all by default.

A program in ``sound/`` has ``program()``, which checks its own results. ``AMBIGUOUS`` is False if
the process never has two layouts that differ.

The guard misjudges a program in ``limits/``: the program is wrong and nothing is raised, or it is
sound and ``REFUSED``.
"""

import re

import corpus
import pytest

pytestmark = pytest.mark.contract

ASKS = re.compile(r"(?P<file>[^\s:]+\.py):(?P<line>\d+):? (?P<function>\S+) asks ")
GIVEN = re.compile(r"but (?P<function>\S+) \((?P<file>[^\s:]+\.py):(?P<line>\d+)\) was given ")


@pytest.fixture(scope="module")
def reports():
    """Run the corpus; return (kind, name) -> rank -> outcomes."""
    return corpus.in_ranks(["wrong", "sound", "limits"])


def outcomes(reports, kind, name):
    """Return the outcomes of one program by rank; skip if the installed core has no such bug."""
    if not corpus.applies(kind, name):
        pytest.skip(f"for cores {', '.join(corpus.constant(kind, name, 'CORES'))}")
    return [report for _, report in sorted(reports[kind, name].items())]


@pytest.mark.parametrize("name", corpus.names("wrong"))
def test_a_wrong_program_is_silent_without_the_guard(reports, name):
    ranks = outcomes(reports, "wrong", name)
    for each in ranks:
        for run in ("silent", "meant"):
            assert each[run]["error"] is None, each[run]["trace"]
    values = [(each["silent"]["value"], each["meant"]["value"]) for each in ranks]
    assert not all(corpus.same(*pair) for pair in values), values


@pytest.mark.parametrize("name", corpus.names("wrong"))
def test_the_guard_names_both_places_of_a_wrong_program(reports, name):
    ranks = outcomes(reports, "wrong", name)
    reading = corpus.constant("wrong", name, "RANKS", range(len(ranks)))
    for each in (ranks[rank]["guarded"] for rank in reading):
        assert each["error"] == "WrongGroupError", each.get("trace", each["value"])
        names_place(each["message"], ASKS, corpus.constant("wrong", name, "READER"))
        if given := corpus.constant("wrong", name, "GIVEN", "program"):
            names_place(each["message"], GIVEN, given)


def names_place(message, pattern, function):
    """Check that the message names a function and a line of its source."""
    found = pattern.search(message)
    assert found, message
    # Before Python 3.12 a comprehension is a separate function.
    named = re.sub(r"\.<locals>\.<(dict|list|set)comp>$", "", found["function"])
    assert named.rpartition(".")[2] == function, message
    assert function in corpus.functions_at(found["file"], int(found["line"])), message


@pytest.mark.parametrize("name", corpus.names("sound"))
def test_a_sound_program_does_not_raise(reports, name):
    ranks = outcomes(reports, "sound", name)
    for rank, each in enumerate(ranks):
        assert each["guarded"]["error"] is None, f"rank {rank}: {each['guarded']['trace']}"
    active = [each["seen"].active for each in ranks]
    assert any(active) == corpus.constant("sound", name, "AMBIGUOUS", True)


@pytest.mark.parametrize("name", corpus.names("limits"))
def test_a_limit_is_still_one(reports, name):
    """If this test fails, the guard has improved: move the program to wrong/ or sound/."""
    ranks = outcomes(reports, "limits", name)
    errors = {each["guarded"]["error"] for each in ranks}
    if corpus.constant("limits", name, "REFUSED"):
        assert errors == {"WrongGroupError"}, ranks
        return
    assert errors == {None}, ranks
    values = [(each["guarded"]["value"], each["meant"]["value"]) for each in ranks]
    assert not all(corpus.same(*pair) for pair in values), values
