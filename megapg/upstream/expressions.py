"""Finds the replacement of one read of Megatron's globals, in one version or in several.

The tables are those of :mod:`megapg.upstream.mapping`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megapg.layout.fields import GROUP_GLOBALS
from megapg.upstream.mapping import (
    BY_NAME,
    FLAGS_OF_HELPERS,
    FORMS,
    HELPERS,
    OF_A_SPLIT,
    OF_A_STAGE,
    OPTIONAL_FIELDS,
    OTHER_GLOBALS,
    OTHERS_GROUPS,
    PRIVATE,
    RANK_GLOBALS,
    REFUSED,
    ROWS,
    SINCE,
    TAKES_VP_STAGE,
    Argument,
    Refusal,
    Replacement,
    Takes,
)
from megapg.upstream.signatures import SIGNATURES, VERSIONS, signature

_UNKNOWN = object()


def known(name: str) -> bool:
    """True if some version of ``parallel_state`` has the name."""
    return name in SIGNATURES or name in PRIVATE or (name[:1] == "_" and _refused(name) is not None)


def replacement(
    name: str,
    arguments: Sequence[Argument] = (),
    versions: Sequence[int] = tuple(VERSIONS),
) -> Replacement | Refusal:
    """Return the replacement of ``name(*arguments)``, or of a private global.

    Args:
        name: in ``parallel_state``.
        arguments: of the call; none for a private global.
        versions: minor numbers of Megatron-core that may run the code. The replacement must mean
            the same in all of them that have the name.
    """
    if not known(name):
        return Refusal("version", "no known version has the name, or not with the fork's meaning")
    if (reason := _refused(name)) is not None:
        return Refusal(reason)
    if name in PRIVATE:
        return _private(name)
    having = [version for version in versions if signature(name, version) is not None]
    if not having:
        return Refusal("version", _present(name))
    answers: dict[Replacement | Refusal, list[int]] = {}
    misfits: list[Refusal] = []
    for version in having:
        answer = _in_version(name, arguments, version)
        if isinstance(answer, Refusal) and answer.is_error:
            misfits.append(answer)  # the call fails there, so it need not mean the same
        else:
            answers.setdefault(answer, []).append(version)
    if not answers:
        return misfits[-1]
    if len(answers) == 1:
        return next(iter(answers))
    common = _whatever_the_version(name, arguments, answers)
    if common is not None:
        return common
    return Refusal("version", "; ".join(f"{_span(at)}: {_spelled(a)}" for a, at in answers.items()))


def _refused(name: str) -> str | None:
    return next((why for start, why in REFUSED.items() if name.startswith(start)), None)


def _present(name: str) -> str:
    having = [version for version in VERSIONS if signature(name, version) is not None]
    return f"{name} is in {_span(having)}"


def _span(versions: Sequence[int]) -> str:
    first, last = versions[0], versions[-1]
    return f"0.{first}" if first == last else f"0.{first} to 0.{last}"


def _spelled(answer: Replacement | Refusal) -> str:
    return answer.expression if isinstance(answer, Replacement) else answer.reason


def _private(name: str) -> Replacement | Refusal:
    if name in GROUP_GLOBALS:
        return _unchecked(GROUP_GLOBALS[name])
    if name in OTHER_GLOBALS:
        return OTHER_GLOBALS[name]
    if name in RANK_GLOBALS:
        field = RANK_GLOBALS[name]
        written = f'list($pg.ranks("{field}"))'
        return Replacement(written, field, "ranks", "may-be-none", (field,))
    return Refusal("arguments", "getters.hybrid_group(pg, size) is the group of one size")


def _unchecked(field: str, checked: str = "False") -> Replacement:
    """Return the group, or None if the globals have none; that is an error if ``checked``."""
    if field == "hcp":
        written = f"$getters.hierarchical_groups($pg, check_initialized={checked})"
    elif field == "pp" or checked != "False":  # if there are several pipelines, it is not None
        written = f'$getters.present_group($pg, "{field}", check_initialized={checked})'
    else:
        written = f'getattr($pg, "{field}", None)'
    caution = "may-be-none" if field in OPTIONAL_FIELDS else ""
    return Replacement(written, field, caution=caution, needs=(field,), takes=Takes.LAZY)


@dataclass(frozen=True)
class _Call:
    """A call with the text of each parameter: the argument, or the default."""

    text: Mapping[str, str]
    given: Sequence[str]

    def passed(self) -> str:
        """Return the given arguments as text to append to another argument."""
        return "".join(f", {name}={self.text[name]}" for name in self.given)

    def value(self, parameter: str) -> object:
        """Return the literal of a parameter; ``_UNKNOWN`` for other code, None if there is none."""
        try:
            return ast.literal_eval(self.text.get(parameter, "None").strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return _UNKNOWN


def _bind(name: str, arguments: Sequence[Argument], version: int) -> _Call | Refusal:
    parameters = signature(name, version) or ()
    texts = {parameter.name: parameter.default for parameter in parameters}
    given: dict[str, str] = {}
    for position, argument in enumerate(arguments):
        if argument.starred:
            return Refusal("arguments", argument.text, is_error=True)
        if not argument.keyword and position >= len(parameters):
            return Refusal("arguments", f"{len(arguments)} arguments in 0.{version}", is_error=True)
        keyword = argument.keyword or parameters[position].name
        if keyword not in texts or keyword in given:
            return Refusal("arguments", f"{keyword}= in 0.{version}", is_error=True)
        text = argument.text
        given[keyword] = f"({text})" if ":=" in text and not argument.keyword else text
    return _Call({**texts, **given}, tuple(given))


def _in_version(name: str, arguments: Sequence[Argument], version: int) -> Replacement | Refusal:
    if name in OF_A_STAGE:
        return _of_a_stage(name, arguments, version)
    call = _bind(name, arguments, version)
    if isinstance(call, Refusal):
        return call
    if name == "get_hybrid_data_context_parallel_groups":
        if call.value("check_initialized") is not True or "group_size" not in call.given:
            return Refusal("arguments", "pass group_size=")
        return Replacement(
            f"$getters.hybrid_group($pg, {call.text['group_size']})", takes=Takes.GLOBALS
        )
    if name in OF_A_SPLIT:
        rank = call.passed()
        return Replacement(f"$getters.{name}($pg{rank})", "pp", needs=("pp",), takes=Takes.JOB)
    if name in BY_NAME:
        return BY_NAME[name]
    if name == "get_amax_reduction_group" and version == 8:  # always over tp
        call = _Call({**call.text, "tp_only_amax_red": "True"}, call.given)
    end = next(end for end in FORMS if name.endswith(end))
    found = _of_a_group(name.removeprefix("get_").removesuffix(end), end, call)
    if isinstance(found, Replacement):
        since = max(SINCE.get(field, 0) for field in found.needs)
        if version < since:
            return Refusal("no-field", f"before 0.{since} the globals have it elsewhere")
    return found


def _whatever_the_version(
    name: str,
    arguments: Sequence[Argument],
    answers: Mapping[Replacement | Refusal, Sequence[int]],
) -> Replacement | None:
    """Return a helper that does in each version what the call does there, or None."""
    of_each = [answer for answer in answers if isinstance(answer, Replacement)]
    if len(of_each) < len(answers):
        return None
    if name in OF_A_STAGE and not arguments:  # the helper's default is that of the installed core
        oldest = min(of_each, key=lambda answer: answers[answer][0])  # it needs the most fields
        return replace(oldest, template=f"$getters.{name}($pg)")
    end = next((end for end in FORMS if name.endswith(end)), "")
    middle = name.removeprefix("get_").removesuffix(end)
    if not any("with_gtp_remat" in row.true for row in ROWS.get(middle, ())):
        return None
    found: set[Replacement | Refusal] = set()
    for version in (version for at in answers.values() for version in at):
        call = _bind(name, arguments, version)
        if isinstance(call, Refusal) or call.value("check_initialized") not in (True, None):
            return None
        flags = {flag: call.value(flag) for flag in call.text if flag != "check_initialized"}
        found.add(_at_run_time(middle, FORMS[end][0], call, flags))
    answer = found.pop()
    return answer if not found and isinstance(answer, Replacement) else None


def _of_a_stage(name: str, arguments: Sequence[Argument], version: int) -> Replacement | Refusal:
    unpacked = [argument.text for argument in arguments if argument.text.startswith("**")]
    call = _bind(name, [a for a in arguments if not a.text.startswith("**")], version)
    if isinstance(call, Refusal):
        return call
    field = OF_A_STAGE[name]
    by_default = "ignore_virtual" not in call.given
    if not unpacked and call.value("ignore_virtual") is True:
        flag = "" if by_default else ", ignore_virtual=True"
        return Replacement(f"$getters.{name}($pg{flag})", field, needs=(field,))
    if version >= TAKES_VP_STAGE:
        passed = "".join(f", {text}" for text in unpacked)
        written = f"$getters.{name}($pg{call.passed()}{passed})"
    elif unpacked:
        return Refusal("arguments", ", ".join(unpacked))
    else:  # with the default written out, which differs from 0.13 on
        written = f"$getters.{name}($pg, ignore_virtual={call.text['ignore_virtual']})"
    # Only the job knows the number of chunks of the virtual pipeline.
    if field == "pp":
        return Replacement(written, field, needs=(field,), takes=Takes.JOB)
    return Replacement(written, field, needs=(field, "pp"), takes=Takes.GLOBALS)


def _of_a_group(middle: str, end: str, call: _Call) -> Replacement | Refusal:
    asks, form = FORMS[end]
    flags = {name: call.value(name) for name in call.text if name != "check_initialized"}
    checked = call.value("check_initialized") if "check_initialized" in call.text else True
    seen = all(isinstance(value, bool) for value in flags.values())
    rows = (row for row in ROWS[middle] if all(flags.get(name) for name in row.true))
    row = next(rows) if seen else None
    if checked is not True and (asks != "group" or row is None or row.helper):
        return Refusal("arguments", "check_initialized")
    if row is None:
        return _at_run_time(middle, asks, call, flags)
    field = row.field
    if field == "intra_dp_cp" and not flags.get("with_context_parallel"):
        missing = "partial_data_parallel needs with_context_parallel"
        return Refusal("arguments", missing, is_error=True)
    if row.helper:
        return _ask_helper(middle, asks, row.helper.strip(), flags)
    if checked is not True:
        flag = "False" if checked is False else call.text["check_initialized"]
        return _unchecked(field, flag)
    if field == "hcp":
        return Replacement("$getters.hierarchical_groups($pg)", field, asks, needs=(field,))
    if asks == "gloo":
        # A collection without the companion raises, and no other collection serves instead.
        return Replacement(form.format(field=field), field, asks, needs=(field,), takes=Takes.JOB)
    # A field calls the getters of the same name; these getters have other names.
    if asks == "first" or (asks == "group" and middle in OTHERS_GROUPS):
        passed = "".join(f", {flag}=True" for flag in row.true)
        form = f"$getters.{HELPERS[middle][asks]}($pg{passed})"
    elif asks == "group" and field in OPTIONAL_FIELDS:
        form = '$getters.present_group($pg, "{field}")'
    return Replacement(form.format(field=field), field, asks, needs=(field,))


def _at_run_time(
    middle: str, asks: str, call: _Call, flags: Mapping[str, object]
) -> Replacement | Refusal:
    """Return the replacement for a flag that is no literal: a helper takes the flag."""
    unknown = {name for name, value in flags.items() if not isinstance(value, bool)}
    others = {name for name, value in flags.items() if value is True} - FLAGS_OF_HELPERS
    # With flags for rematerialisation, the helpers raise if it makes a difference.
    if middle not in HELPERS or not unknown <= FLAGS_OF_HELPERS or others - {"with_gtp_remat"}:
        return Refusal("arguments", ", ".join(sorted(unknown)))
    passed = ", ".join(
        f"{name}={call.text[name]}"
        for name, value in flags.items()
        if name in FLAGS_OF_HELPERS and value is not False
    )
    return _ask_helper(middle, asks, passed, flags)


def _ask_helper(
    middle: str, asks: str, passed: str, flags: Mapping[str, object]
) -> Replacement | Refusal:
    helpers, needs = HELPERS[middle], _candidates(middle, flags)
    arguments = f"$pg, {passed}" if passed else "$pg"
    if asks in helpers:
        return Replacement(f"$getters.{helpers[asks]}({arguments})", needs=needs)
    return Refusal("arguments", passed)


def _candidates(middle: str, flags: Mapping[str, object]) -> tuple[str, ...]:
    """Return the fields between which a helper chooses, as far as its flags are known."""
    found: dict[str, None] = {}
    for row in ROWS[middle]:
        asked = [name in FLAGS_OF_HELPERS and flags.get(name, False) for name in row.true]
        if not any(value is False for value in asked):
            found[row.field] = None
        if all(value is True for value in asked):
            break  # the rows below can't be chosen
    return tuple(found)
