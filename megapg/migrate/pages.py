"""The pages of the guide that come from the tables: one per reason code, one per version.

``python -m megapg.migrate.pages migration_guide`` writes them. They are checked in, and a test
holds them against the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

from megapg.errors import MegapgError
from megapg.migrate.mapping import PRIVATE, Argument, Refusal, Replacement, Takes, replacement
from megapg.migrate.reasons import CAUTIONS, REASONS, Reason
from megapg.migrate.signatures import SIGNATURES, VERSIONS, Parameter, functions, signature

FOLDERS = ("reasons", "mapping")
"""Where every page comes from here."""

_WRITTEN_BY = "<!-- Written by python -m megapg.migrate.pages; do not edit. -->"


@dataclass(frozen=True)
class Example:
    """Code with a reason, and the same without it.

    Attributes:
        before: what the reason is given for.
        after: what a person makes of it.
        versions: of Megatron-core, as ``--from-core`` takes them.
    """

    before: str
    after: str
    versions: str = "0.16"


EXAMPLES: Mapping[str, Example] = {
    "lifecycle": Example(
        """
from megatron.core import parallel_state


def main(args):
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    try:
        train(args)
    finally:
        parallel_state.destroy_model_parallel()
""",
        """
import megapg


def main(args):
    with megapg.session(tp=args.tp, pp=args.pp) as session:
        train(args, pg_collection=session.groups)
""",
    ),
    "setter": Example(
        """
from megatron.core import mpu


def convert(checkpoint, tp):
    mpu.set_tensor_model_parallel_world_size(tp)
    for rank in range(tp):
        mpu.set_tensor_model_parallel_rank(rank)
        save_shard(checkpoint)
""",
        """
from megapg.testing import fake_collection


def convert(checkpoint, tp):
    for rank in range(tp):
        with fake_collection(tp=tp, rank=rank) as pg:
            save_shard(checkpoint, pg_collection=pg)
""",
    ),
    "vp-stage": Example(
        """
from megatron.core import mpu


def first_layer(layers_per_chunk):
    chunk = mpu.get_virtual_pipeline_model_parallel_rank() or 0
    return chunk * layers_per_chunk
""",
        """
def first_layer(layers_per_chunk, *, vp_stage=None):
    return (vp_stage or 0) * layers_per_chunk
""",
    ),
    "stage-default": Example(
        """
from megatron.core import mpu


def log(loss):
    if mpu.is_pipeline_last_stage():
        print(loss)
""",
        """
from megapg.megatron import getters


def log(loss, *, pg_collection):
    if getters.is_pipeline_last_stage(pg_collection, ignore_virtual=True):
        print(loss)
""",
        versions="0.12-0.16",
    ),
    "version": Example(
        """
from megatron.core import mpu


def batch(size):
    return size // mpu.get_data_parallel_world_size(with_context_parallel=True)
""",
        """
from megapg.megatron import getters


def batch(size, *, pg_collection):
    return size // pg_collection.size("dp_cp")  # pinned: megatron-core>=0.16,<0.19
""",
        versions="0.16-0.19",
    ),
    "not-in-core": Example(
        """
from megatron.core import parallel_state


def setup():
    if parallel_state.is_unitialized():
        raise RuntimeError("no groups")
""",
        """
def setup(*, pg_collection):
    if pg_collection is None:
        raise RuntimeError("no groups")
""",
        versions="0.19",
    ),
    "unknown-name": Example(
        """
from megatron.core import mpu


def gather(tensor):
    return all_gather(tensor, mpu.get_ulysses_parallel_group())
""",
        """
def gather(tensor, *, ulysses_group):
    return all_gather(tensor, ulysses_group)
""",
    ),
    "encoder-decoder": Example(
        """
from megatron.core import mpu


def setup(config):
    mpu.set_pipeline_model_parallel_split_rank(config.encoder_stages)
""",
        """
def setup(config):
    return config.encoder_stages  # passed on, to what asked for it
""",
        versions="0.12",
    ),
    "no-field": Example(
        """
from megatron.core import mpu


def average(grad):
    all_reduce(grad, group=mpu.get_data_modulo_expert_parallel_group())
""",
        """
def average(grad, *, data_modulo_expert_group):
    all_reduce(grad, group=data_modulo_expert_group)
""",
        versions="0.9",
    ),
    "run-time-flag": Example(
        """
from megatron.core import mpu


def companion(with_cp):
    return mpu.get_data_parallel_group_gloo(with_context_parallel=with_cp)
""",
        """
from megapg.megatron import getters


def companion(with_cp, *, pg_collection):
    return getters.gloo_group(pg_collection, "dp_cp" if with_cp else "dp")
""",
    ),
    "unchecked": Example(
        """
from megatron.core import mpu


def ranks():
    return mpu.get_context_parallel_global_ranks(check_initialized=False)
""",
        """
def ranks(*, pg_collection=None):
    return None if pg_collection is None else pg_collection.ranks("cp")
""",
    ),
    "arguments": Example(
        """
from megatron.core import mpu


def group(**flags):
    return mpu.get_data_parallel_group(**flags)
""",
        """
from megapg.megatron import getters


def group(*, with_context_parallel=False, pg_collection):
    return getters.data_group(pg_collection, with_context_parallel=with_context_parallel)
""",
    ),
    "no-state": Example(
        """
from megatron.core.parallel_state import RankGenerator


def data_ranks(tp, dp, pp):
    return RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-dp-pp").get_ranks("dp")
""",
        """
from megapg import ParallelLayout


def data_ranks(tp, dp, pp):
    return list(ParallelLayout(world_size=tp * dp * pp, tp=tp, pp=pp).partition("dp"))
""",
    ),
    "buffer": Example(
        """
from megatron.core import parallel_state


def end():
    parallel_state.destroy_global_memory_buffer()
""",
        """
def end(session):
    session.close()  # the buffer goes with the groups
""",
    ),
    "assigned": Example(
        """
from megatron.core import mpu


def pretend_one_rank():
    mpu.get_tensor_model_parallel_world_size = lambda: 1
    return build_model()
""",
        """
from megapg.testing import fake_collection


def pretend_one_rank():
    with fake_collection(tp=1) as pg:
        return build_model(pg_collection=pg)
""",
    ),
    "patched": Example(
        """
from unittest.mock import patch

from layers import shard


def test_shard():
    with patch("megatron.core.parallel_state.get_tensor_model_parallel_world_size") as size:
        size.return_value = 2
        assert shard(8) == 4
        size.assert_called_once()
""",
        """
from layers import shard

from megapg.testing import fake_collection


def test_shard():
    with fake_collection(tp=2) as pg:
        assert shard(8, pg_collection=pg) == 4
""",
    ),
    "as-value": Example(
        """
from megatron.core import mpu


def setup(logger):
    logger.rank_of = mpu.get_data_parallel_rank
""",
        """
def setup(logger, *, pg_collection):
    logger.rank_of = lambda: pg_collection.rank("dp")
""",
    ),
    "module-as-value": Example(
        """
import deepspeed
from megatron.core import mpu


def build():
    with deepspeed.zero.Init(mpu=mpu):
        return make_model()
""",
        """
import deepspeed
from megatron.core import mpu

import megapg


def build(*, pg_collection):
    with megapg.published(pg_collection), deepspeed.zero.Init(mpu=mpu):  # megapg: keep
        return make_model()
""",
    ),
    "dynamic": Example(
        """
from megatron.core import mpu


def expert_ranks():
    if hasattr(mpu, "get_expert_tensor_parallel_world_size"):
        return mpu.get_expert_tensor_parallel_world_size()
    return 1
""",
        """
def expert_ranks(*, pg_collection):
    return pg_collection.size("expt_tp") if hasattr(pg_collection, "expt_tp") else 1
""",
    ),
    "ambiguous": Example(
        """
try:
    from megatron.core import mpu
except ImportError:
    from shim import mpu


def rank():
    return mpu.get_tensor_model_parallel_rank()
""",
        """
def rank(*, pg_collection=None):
    return 0 if pg_collection is None else pg_collection.rank("tp")
""",
    ),
    "may-be-none": Example(
        """
from megatron.core import mpu


def tie(weight):
    all_reduce(weight.grad, group=mpu.get_embedding_group(check_initialized=False))
""",
        """
def tie(weight, *, pg_collection):
    if pg_collection.embd is not None:
        all_reduce(weight.grad, group=pg_collection.embd)
""",
    ),
    "private-global": Example(
        """
from megatron.core import parallel_state


def replicas():
    if parallel_state._DATA_PARALLEL_GLOBAL_RANKS is None:
        return []
    return parallel_state._DATA_PARALLEL_GLOBAL_RANKS
""",
        """
def replicas(*, pg_collection=None):
    return [] if pg_collection is None else pg_collection.ranks("dp")
""",
    ),
    "in-a-string": Example(
        """
from megatron.core import mpu


def name(step):
    return f"step {step}{f'-{mpu.get_tensor_model_parallel_rank()}' if step else ''}"
""",
        """
def name(step, *, pg_collection):
    rank = pg_collection.rank("tp")
    return f"step {step}{f'-{rank}' if step else ''}"
""",
    ),
    "at-import": Example(
        """
from megatron.core import mpu

RANK = mpu.get_data_parallel_rank()


def speaks():
    return RANK == 0
""",
        """
def speaks(*, pg_collection):
    return pg_collection.rank("dp") == 0
""",
    ),
    "comment-inside": Example(
        """
from megatron.core import mpu


def replicas():
    return mpu.get_data_parallel_group(
        with_context_parallel=True,  # norms are replicated there too
    )
""",
        """
def replicas(*, pg_collection):
    return pg_collection.dp_cp  # norms are replicated there too
""",
    ),
}

OF_FILES = ("unverified", "unwritten")
"""Codes that say something of a whole file, whatever stands in it: no example can have them."""


def pages() -> Mapping[str, str]:
    """Path below the guide's folder -> text, of every page.

    Raises:
        MegapgError: a code has no example.
    """
    explained = {**REASONS, **CAUTIONS}
    if lacking := set(explained) - set(EXAMPLES) - set(OF_FILES):
        raise MegapgError(f"codes without an example in {__name__}: {', '.join(sorted(lacking))}.")
    return {
        "mapping.md": _mapping_index(),
        **{f"mapping/0.{version}.md": _mapping_page(version) for version in VERSIONS},
        "reasons/README.md": _reasons_index(),
        **{f"reasons/{code}.md": _reason_page(reason) for code, reason in explained.items()},
    }


def write(guide: Path) -> None:
    """Write the pages below a folder, and remove those of codes and versions that are gone."""
    texts = pages()
    for folder in FOLDERS:
        (guide / folder).mkdir(exist_ok=True)
        for old in (guide / folder).glob("*.md"):
            if f"{folder}/{old.name}" not in texts:
                old.unlink()
    for name, text in texts.items():
        (guide / name).write_text(text, encoding="utf-8")


# -- reasons ---------------------------------------------------------------------------------------


def _reasons_index() -> str:
    return _page(
        "Why something is left",
        "`megapg check` and `megapg migrate` print one of these codes beside each use that they "
        "leave. `megapg explain CODE` says the same in the terminal.",
        "## Left",
        _table(("code", ""), ((_link(each.code), each.title) for each in REASONS.values())),
        "## With a caution",
        "There is a replacement, and it may behave differently where there are no groups. `megapg "
        "migrate` writes it with `--unsafe` only.",
        _table(("code", ""), ((_link(each.code), each.title) for each in CAUTIONS.values())),
    )


def _reason_page(reason: Reason) -> str:
    names = _names_with(reason.code)
    return _page(
        f"`{reason.code}`: {reason.title}",
        reason.why,
        *_shown(EXAMPLES.get(reason.code)),
        "## What to do",
        reason.instead,
        *(("## Names that always have it", ", ".join(map(_quoted, names))) if names else ()),
        "[All codes](README.md)",
    )


def _shown(example: Example | None) -> Iterator[str]:
    if example is not None:
        read_as = "" if example.versions == "0.16" else f", on Megatron-core {example.versions}"
        yield f"Before{read_as}:"
        yield _code(example.before)
        yield "After:"
        yield _code(example.after)


def _names_with(code: str) -> list[str]:
    """Names that get a code whatever the arguments, in every version that has them."""
    names = [name for name in (*SIGNATURES, *sorted(PRIVATE)) if _by_name(name) == code]
    return sorted(names, key=lambda name: (name.startswith("_"), name))


def _by_name(name: str) -> str:
    """The one reason of every call of a name; empty where there is none, or not one."""
    versions = [version for version in VERSIONS if signature(name, version) is not None]
    answers = [answer for version in versions for _, answer in _answers(name, version)]
    if name in PRIVATE:
        answers = [replacement(name)]
    reasons = {answer.reason if isinstance(answer, Refusal) else "" for answer in answers}
    return reasons.pop() if len(reasons) == 1 else ""


# -- the table of a version ------------------------------------------------------------------------

_Form = tuple[Argument, ...]
_Answer = Replacement | Refusal

_PARTS: Mapping[str, str] = {
    "Groups": "_group _groups _group_gloo",
    "Ranks and sizes": "_rank _world_size",
    "Ranks of others": "_src_rank _first_rank _last_rank _next_rank _prev_rank _global_ranks",
}
_THE_REST = "Stages, and what else there is"

_CANNOT_RUN = ("arguments", "not-in-core")
"""Reasons of calls that the version does not take."""

_OF: Mapping[Takes, str] = {
    Takes.COLLECTION: "",
    Takes.LAZY: "if there is one",
    Takes.OPTIONAL: "of what was passed, None included",
    Takes.JOB: "of a session or the globals",
    Takes.GLOBALS: "asked of the globals",
}
"""From where the collection may come -> what a page says of it."""


def _mapping_index() -> str:
    private = {name: replacement(name) for name in sorted(PRIVATE)}
    return _page(
        "What is written instead of what",
        "Every function of `megatron.core.parallel_state` from "
        f"0.{VERSIONS[0]} to 0.{VERSIONS[-1]}. In what is written, `pg` is the collection and "
        "`getters` is `megapg.megatron.getters`. Where nothing certain can be written there is "
        "[a code for why](reasons/README.md).",
        "## By version",
        _table(
            ("Megatron-core", "functions", "served", "served in some forms", "not served"),
            map(_totals, VERSIONS),
        ),
        "## What changed its meaning",
        "The same call, and what it is in which version. A project that admits versions on both "
        "sides gets the code [version](reasons/version.md): name the one that you run.",
        _table(("call", "written"), _flips()),
        "## Private variables",
        "The same in every version that has them. They can be asked before there are groups.",
        _table(
            ("variable", "written"),
            ((_quoted(name), _written(answer, "reasons/")) for name, answer in private.items()),
        ),
    )


def _totals(version: int) -> Sequence[str]:
    served = [
        {isinstance(answer, Replacement) for _, answer in _answers(name, version)}
        for name in functions(version)
    ]
    counts = [sum(each == kind for each in served) for kind in ({True}, {True, False}, {False})]
    return (f"[0.{version}](mapping/0.{version}.md)", *map(str, (len(served), *counts)))


def _mapping_page(version: int) -> str:
    rows = {name: list(_answers(name, version)) for name in sorted(functions(version))}
    unserved = {name: _reasons_of(rows[name]) for name in rows if _refused_altogether(rows[name])}
    served = [name for name in rows if name not in unserved]
    blocks: list[str] = []
    for title in (*_PARTS, _THE_REST):
        body = [
            _row(_call(name, form), answer)
            for name in served
            if _part(name) == title
            for form, answer in rows[name]
            if not _at_run_time(form)
        ]
        if body:
            blocks += [f"## {title}", _table(_HEADINGS, body)]
    by_reason = sorted((reasons, name) for name, reasons in unserved.items())
    return _page(
        f"Megatron-core 0.{version}",
        "`pg` is the collection, `getters` is `megapg.megatron.getters`. Arguments that are left "
        "out have their defaults; calls that this version refuses itself are not listed.",
        "*Reads* are the fields. What is *of a session or the globals* is not known to a "
        "collection of borrowed groups; what is *asked of the globals* is state of the job, and "
        "the tool writes `megapg.resolve(None)` for `pg`.",
        *blocks,
        *_of_flags({name: rows[name] for name in served}),
        "## Not served",
        _table(
            ("why", "names"),
            (
                (
                    ", ".join(_link(reason, "../reasons/") for reason in reasons),
                    ", ".join(_quoted(name) for _, name in named),
                )
                for reasons, named in groupby(by_reason, key=lambda row: row[0])
            ),
        ),
        "[All versions](../mapping.md)",
    )


_HEADINGS = ("call", "written", "reads")


def _of_flags(rows: Mapping[str, Sequence[tuple[_Form, _Answer]]]) -> Iterator[str]:
    """What is written where an argument is no literal, or where no groups need be there."""
    chosen = [
        _row(_call(name, form), answer)
        for name, answers in rows.items()
        for form, answer in answers
        if _at_run_time(form) and form[-1].keyword != _CHECKED
    ]
    checked = {
        name: {
            form[-1].text: _written(answer, "../reasons/")
            for form, answer in answers
            if _at_run_time(form) and form[-1].keyword == _CHECKED
        }
        for name, answers in rows.items()
    }
    yield "## Flags that show at run time only"
    yield "`flag` is any expression that is no literal."
    if chosen:
        yield _table(_HEADINGS, chosen)
    if any(checked.values()):
        yield f"And `{_CHECKED}`, where no groups need be there:"
        yield _table(
            ("call", f"`{_CHECKED}=False`", f"`{_CHECKED}=flag`"),
            (
                (_quoted(name), each.get("False", ""), each.get(_FLAG, ""))
                for name, each in checked.items()
                if each
            ),
        )


def _row(call: str, answer: _Answer) -> Sequence[str]:
    return _quoted(call), _written(answer, "../reasons/"), _reads(answer)


def _reads(answer: _Answer) -> str:
    """The fields that an expression reads, and of which collections it may."""
    if isinstance(answer, Refusal):
        return ""
    fields = " ".join(answer.needs or filter(None, (answer.field,)))
    return ", ".join(filter(None, (fields, _OF[answer.takes])))


def _part(name: str) -> str:
    for title, ends in reversed(tuple(_PARTS.items())):  # _first_rank ends like _rank
        if name.startswith("get_") and name.endswith(tuple(ends.split())):
            return title
    return _THE_REST


def _refused_altogether(rows: Iterable[tuple[_Form, _Answer]]) -> bool:
    return all(isinstance(answer, Refusal) for _, answer in rows)


def _reasons_of(rows: Iterable[tuple[_Form, _Answer]]) -> tuple[str, ...]:
    return tuple(sorted({answer.reason for _, answer in rows if isinstance(answer, Refusal)}))


def _answers(name: str, version: int) -> Iterator[tuple[_Form, _Answer]]:
    """Every form of a call that a version takes, and what is written for it."""
    for form in _forms(signature(name, version) or ()):
        answer = replacement(name, form, [version])
        if not _cannot_run(answer) or form == (_ANYTHING,):
            yield form, answer


_ANYTHING = Argument("...")
_FLAG = "flag"


def _forms(parameters: Sequence[Parameter]) -> Iterator[_Form]:
    """The arguments that a call may have.

    All literals of all flags together; then one flag at a time that shows at run time only, and
    ``check_initialized``, which chooses no group.
    """
    if [parameter.name for parameter in parameters] == [_ANYTHING.text]:
        yield (_ANYTHING,)
        return
    needed = tuple(Argument(each.name) for each in parameters if not each.default)
    named = [each for each in parameters if each.default]
    for choice in product(*map(_literals, named)):
        yield (*needed, *(argument for argument in choice if argument))
    for each in named:
        if each.name == _CHECKED:
            yield (*needed, Argument("False", each.name))
        if each.default in ("True", "False"):
            yield (*needed, Argument(_FLAG, each.name))


_CHECKED = "check_initialized"


def _literals(parameter: Parameter) -> Sequence[Argument | None]:
    """What may be given for a parameter, first of all nothing."""
    if parameter.name == _CHECKED:
        return (None,)
    other = {"True": "False", "False": "True"}.get(parameter.default, parameter.name)
    return (None, Argument(other, parameter.name))


def _at_run_time(form: _Form) -> bool:
    return any(each.keyword == _CHECKED or each.text == _FLAG for each in form)


def _cannot_run(answer: _Answer) -> bool:
    return isinstance(answer, Refusal) and answer.reason in _CANNOT_RUN


# -- what changed ----------------------------------------------------------------------------------

_History = Mapping[_Answer, Sequence[int]]
"""What a call means -> in which versions."""


_BY_POSITION: Sequence[_Form] = ((Argument("True"),), (Argument("True"), Argument("True")))


def _flips() -> Iterator[Sequence[str]]:
    """Calls that mean one thing in some versions and another in others."""
    for name in sorted(SIGNATURES):
        parameters = [signature(name, version) or () for version in VERSIONS]
        by_keyword = dict.fromkeys(form for each in parameters for form in _forms(each))
        histories = [(form, _history(name, form)) for form in by_keyword]
        # By position only where that is another thing than by keyword: the order has changed.
        for form in _BY_POSITION:
            history = _history(name, form)
            if all(history != other for _, other in histories):
                histories.append((form, history))
        for form, history in histories:
            if len(history) > 1:
                meanings = (
                    f"{_span(versions)}: {_written(answer, 'reasons/')}"
                    for answer, versions in history.items()
                )
                yield _quoted(_call(name, form)), "<br>".join(meanings)


def _history(name: str, form: _Form) -> _History:
    history: dict[_Answer, list[int]] = {}
    for version in VERSIONS:
        answer = replacement(name, form, [version])
        if not _cannot_run(answer):
            means = Refusal(answer.reason) if isinstance(answer, Refusal) else answer
            history.setdefault(means, []).append(version)
    return history


# -- Markdown --------------------------------------------------------------------------------------


def _page(title: str, *blocks: str) -> str:
    return "\n\n".join((_WRITTEN_BY, f"# {title}", *blocks)) + "\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"```python\n{text.strip()}\n```"


def _call(name: str, form: _Form) -> str:
    written = (f"{each.keyword}={each.text}" if each.keyword else each.text for each in form)
    return f"{name}({', '.join(written)})"


def _quoted(text: str) -> str:
    return f"`{text}`"


def _link(code: str, to: str = "") -> str:
    return f"[{code}]({to}{code}.md)"


def _written(answer: _Answer, to: str) -> str:
    if isinstance(answer, Replacement):
        caution = f", {_link(answer.caution, to)}" if answer.caution else ""
        return _quoted(answer.expression) + caution
    return _link(answer.reason, to) + (f": {answer.detail}" if answer.detail else "")


def _span(versions: Sequence[int]) -> str:
    """``0.5 to 0.9, 0.12``: neighbours together."""
    runs = groupby(enumerate(versions), key=lambda pair: pair[1] - pair[0])
    parts = [[version for _, version in run] for _, run in runs]
    return ", ".join(
        f"0.{part[0]}" + (f" to 0.{part[-1]}" if len(part) > 1 else "") for part in parts
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m megapg.migrate.pages GUIDE")
    write(Path(sys.argv[1]))
