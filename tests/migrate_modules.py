"""Random packages that use Megatron's globals in every way there is, the same for the same seed.

They run: every function is a deterministic one of whole numbers that returns what it read and what
the functions that it called returned, so that a package can be run before a migration and after.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

PACKAGE = "fuzzed"
_NEW_FSTRINGS = _TYPE_PARAMETERS = sys.version_info >= (3, 12)


@dataclass(frozen=True)
class Driver:
    """Something to evaluate, with the names of one module.

    Attributes:
        module: dotted name.
        expression: of a whole number, or of a tuple of such.
        guarded: whether it is defined where the globals are not initialised, too.
    """

    module: str
    expression: str
    guarded: bool


@dataclass(frozen=True)
class Package:
    """A package and what to run of it.

    Attributes:
        seed: what it was made from.
        files: relative name -> bytes.
        drivers: what to evaluate.
        modules: how many of the files are made up; the others are the same every time.
        overrides: whether it sets ranks or patches getters for a while.
    """

    seed: int
    files: Mapping[str, bytes]
    drivers: tuple[Driver, ...]
    modules: int
    overrides: bool


def make_package(seed: int) -> Package:
    """The package of a seed."""
    return _Maker(seed).make()


# -- reads -----------------------------------------------------------------------------------------

_DATA = (
    "",
    "with_context_parallel=True",
    "with_context_parallel=False",
    "True",
    "with_context_parallel=True, partial_data_parallel=True",
    "with_context_parallel=«flag»",
)
_NUMBERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("get_tensor_model_parallel_rank", ("",)),
    ("get_tensor_model_parallel_world_size", ("",)),
    ("get_tensor_model_parallel_src_rank", ("",)),
    ("get_pipeline_model_parallel_rank", ("",)),
    ("get_pipeline_model_parallel_world_size", ("",)),
    ("get_pipeline_model_parallel_first_rank", ("",)),
    ("get_pipeline_model_parallel_last_rank", ("",)),
    ("get_pipeline_model_parallel_next_rank", ("",)),
    ("get_pipeline_model_parallel_prev_rank", ("",)),
    ("get_context_parallel_rank", ("",)),
    ("get_context_parallel_world_size", ("",)),
    ("get_data_parallel_rank", _DATA),
    ("get_data_parallel_world_size", _DATA),
    ("get_data_parallel_src_rank", ("", "with_context_parallel=True")),
    ("get_model_parallel_src_rank", ("",)),
    ("get_expert_model_parallel_rank", ("",)),
    ("get_expert_model_parallel_world_size", ("",)),
    ("get_expert_tensor_parallel_rank", ("",)),
    ("get_expert_tensor_parallel_world_size", ("",)),
    ("get_expert_data_parallel_rank", ("", "partial_expert_data_parallel=True")),
    ("get_expert_data_parallel_world_size", ("",)),
    ("get_tensor_and_context_parallel_rank", ("",)),
    ("get_tensor_and_context_parallel_world_size", ("",)),
    ("get_expert_tensor_and_model_parallel_rank", ("",)),
    ("get_expert_tensor_and_model_parallel_world_size", ("",)),
)
_TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("is_pipeline_first_stage", ("", "ignore_virtual=True")),
    ("is_pipeline_last_stage", ("", "ignore_virtual=True", "True")),
    ("is_pipeline_last_stage", ("ignore_virtual=False, vp_stage=1", "False, 0")),
    ("is_pipeline_first_stage", ("vp_stage=0, ignore_virtual=False", "ignore_virtual=«flag»")),
    ("is_rank_in_embedding_group", ("", "ignore_virtual=True", "ignore_virtual=False, vp_stage=0")),
    ("is_rank_in_position_embedding_group", ("",)),
    ("is_initialized", ("",)),
    ("model_parallel_is_initialized", ("",)),
)
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("get_tensor_model_parallel_group", ("", "check_initialized=False", "False")),
    ("get_pipeline_model_parallel_group", ("",)),
    ("get_model_parallel_group", ("", "check_initialized=True")),
    ("get_context_parallel_group", ("", "check_initialized=«flag»")),
    ("get_data_parallel_group", _DATA),
    ("get_expert_model_parallel_group", ("",)),
    ("get_expert_tensor_parallel_group", ("",)),
    ("get_expert_data_parallel_group", ("", "partial_expert_data_parallel=True")),
    ("get_expert_tensor_and_model_parallel_group", ("",)),
    ("get_expert_tensor_model_pipeline_parallel_group", ("",)),
    ("get_tensor_and_context_parallel_group", ("",)),
    ("get_tensor_and_data_parallel_group", ("", "with_context_parallel=True")),
    (
        "get_amax_reduction_group",
        ("", "with_context_parallel=True", "True, True", "with_context_parallel=«flag»"),
    ),
)
_PRIVATE = ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP")

# -- expressions -----------------------------------------------------------------------------------

# In all templates a word in «» is a hole:
#   r, b, g  a read: a number, a truth, a group        e  an expression of reads
#   a        a read, or an expression in parentheses   i  a whole number without reads
#   fr       a read that stands in an f-string
#   cf       a call that stands in an f-string
#   c        a call of another function                f  an f-string with reads
#   s        statements, where there is `out`          N, M, O  names of its own
# An upper-case E, R or C is where the module runs when it is imported.
_ANYWHERE = (
    "«a» + «a»",
    "«a» * 3 - «a»",
    "-«a»",
    "(not «a»)",
    "(not «b» or «b»)",
    "«a» ** 2",
    "2 ** («a» % 5)",
    "~«a» & 7",
    "«a» if «b» else «a»",
    "«i» if «a» > 1 else «i»",
    "«a» and «a» or «i»",
    "«b» and «b»",
    "«i» < «a» <= «a» < 999",
    "«a» == «a»",
    "«a» in («a», «a»)",
    "[«e», «e»][0]",
    "(«e», «e»)[«b»]",
    "(«e»,)[0]",
    "[*[«e»], «e»][-1]",
    "len({«a»: «a»})",
    "len({«e», «e»})",
    "len({«e» + q for q in range(2)})",
    "sum([«e» for _ in range(2)])",
    "sum(«e» for _ in range(2))",
    "sum(q + «a» for q in range(3) if q < «a»)",
    "sum(p * q for p in range(«a» % 4) for q in [«e»])",
    "max({q: «a» for q in range(2)}.values())",
    "(lambda: «e»)()",
    "(lambda x=«e»: x)()",
    "(lambda x, *, y=«e»: x + y)(«e»)",
    "(lambda *q: q[0] + «a»)(«i»)",
    "(lambda mpu: mpu + 1)(«a»)",
    "max(«e», «e»)",
    "max(«e», *[«e»])",
    "int(«b»)",
    "«g».size()",
    "«g».rank() + «g».size()",
    "(«g»).size()",
    "int(«g» is «g»)",
    "int(«g» is not None)",
    "dict(a=«e», b=«e»)[«q»a«q»]",
    "len(str(«e»))",
    "len(«q»%d«q» % «a»)",
    "len(«f»)",
    "sum(x() for x in («v»,))",
    "(«v»)()",
    "(«m» is not None)",
    "int(hasattr(«m», «q»get_tensor_model_parallel_rank«q»))",
    "getattr(«m», «q»get_tensor_model_parallel_rank«q»)()",
    "«m».«private».size()",
    "id(«g») and 1",
    "len([x for x in range(9)][«a» % 3 : «a» % 9 + 3 : 1])",
)
# Not where a name can't be bound, as in a comprehension's iterable or a class body's.
_WALRUS = ("(w := «e») + w", "(w := «r»)", "[w := «a», w][1]")
_SEVERAL_LINES = (
    "«a» \\\n        + «a»",
    "(\n        «a»  # the first\n        # and then\n        + «a»\n    )",
    "max(\n        «e»,\n        «e»,  # the last\n    )",
    "(\n «a»\n+\n «a»)",
    "[\n    «e»\n    for q in range(2)  # twice\n    if «b»\n    or True\n][0]",
)
_FSTRINGS = (
    "f«q»{«x»}«q»",
    "f«q»{«x»} and {«x»!r}«q»",
    "f«q»{«x»:>4}|{«x»:{«x»}}«q»",
    "f«q»{{}} {«x»} {{«q»",
    "rf«q»\\d{«x»}\\w«q»",
    "F«q»é {«x»}«q»",
    "«q»a «q» f«q»{«x»}«q» «q» b«q»",
    "f«q»{(«x») + 1}{ «x» }«q»",
    "f«q»{«x»=}«q»",
    "f«q»{ «x» = }«q»",
    "f«q»{(lambda: «x»)()}«q»",
    "f«q»{dict(k=«x»)[«p»k«p»]}«q»",
    "f«q»{f«p»{«x»}«p»} {«x»}«q»",
    "f«q»{[«x» for _ in range(2)]}«q»",
    "f«q»{«x» if «x» else «x»}«q»",
    "f«q»{max(«x», «x»):<3}«q» f«q»{«x»}«q»",
    "str(«x») + f«q»{«x»}«q»",
    "f«q»{«x»}«q».join([«q»-«q»] * 2)",
    "f«q»{(w := «x»)}«q»",
)
_LONG_FSTRINGS = (
    "f«t»\n é {«x»}\n  {«x»:>3} {{ }}\n«t»",
    "f«t»{\n    «x»\n}«t»",
    "f«t»'{«x»}' \"{«x»!s}\" «t»",
)
_NEWER_FSTRINGS = (
    'f"{«x» + len("x")}"',
    'f"{f"{f"{«x»}"}"}"',
    'f"{max(\n    «x»,  # one\n    «x»,\n)}"',
    "f'{«x»:{'>'}{«x»}}'",
    'f"{"\\n".join([str(«x»)])}"',
)

# -- statements ------------------------------------------------------------------------------------

_STATEMENTS = (
    "out.append(«e»)",
    "out.append(«e»)",
    "out.append(«e»)  # reads: mpu.get_tensor_model_parallel_rank()",
    "out.append(«r»)  # megapg: keep",
    "out += [«e», «e»]",
    "out.append(not «a»)",
    "out.append(not «b» and not «b»)",
    "out.append(lambda: «e») or out.append(out.pop()())",
    "out.append(«c»)",
    "out.append(«c»)",
    "out.extend([«c», «e»])",
    "«N» = «e»\nout.append(«N»)",
    "«N» = «r»; out.append(«N»); «M» = «e»; out.append(«M»);",
    "«N» = «M» = «e»\nout.append((«N», «M»))",
    "«N», *«M» = «e», «e», «e»\nout.append((«N», tuple(«M»)))",
    "«N»: int = «e»\nout.append(«N»)",
    "«N» = 1\n«N» += «e»\n«N» *= «a»\nout.append(«N»)",
    "if «e»:\n    out.append(«e»)\nelif «e»:\n    out.append(«c»)\nelse:\n    out.append(«e»)",
    "if «b»: out.append(«e»)",
    "if «b»: out.append(«e»); out.append(«e»)\nelse: out.append(«e»)",
    "if (w := «r») > 1:\n    out.append(w)",
    "if not «b»:\n    pass\nelse:\n    out.append(«e»)",
    "for «N» in range(«a» % 3):\n    out.append(«N» + «e»)\nelse:\n    out.append(«e»)",
    "for «N» in [«e», «e»]: out.append(«N»)",
    "for «N» in range(3):\n    if «N» == «i»: continue\n    out.append(«e»)",
    "try:\n    raise ExceptionGroup(«q»«q», [KeyError(«e»)])\n"
    "except* KeyError as «N»:\n    out.append(«N».exceptions[0].args[0] + «e»)",
    "match [«e», {«q»k«q»: «e»}]:\n    case [int(), {«q»k«q»: «N», **«M»}] if «b»:\n"
    "        out.append(«N» + «e»)\n    case [None, *_]:\n        pass",
    "while len(out) < «a» % 4:\n    out.append(«e»)\n    if «b»:\n        break",
    "with contextlib.nullcontext(«e») as «N»:\n    out.append(«N»)",
    "with contextlib.nullcontext(«e»), contextlib.nullcontext(«g») as «N»:\n"
    "    out.append((«N».size(), «e»))",
    "with (\n    contextlib.nullcontext(«e») as «N»,  # one\n    contextlib.nullcontext(),\n):\n"
    "    out.append(«N»)",
    "with contextlib.suppress(ZeroDivisionError): out.append(«e»)",
    "try:\n    out.append(«e»)\nfinally:\n    out.append(«e»)",
    "try:\n    out.append(«e» // 0)\nexcept ZeroDivisionError as «N»:\n    out.append(«e»)",
    "try:\n    out.append(«c»)\nexcept (ZeroDivisionError): pass\nelse: out.append(«e»)",
    "try:\n    raise ValueError(«e»)\nexcept ValueError as «N»:\n    out.append(«N».args)",
    "match «e»:\n    case 0 | 1:\n        out.append(«e»)\n    case «N» if «N» < «a»:\n"
    "        out.append(«N»)\n    case _:\n        out.append(«c»)",
    "match («e», «e»):\n    case [«N», *«M»] if «b»: out.append(«N»)\n    case _: pass",
    "match = «e»\nout.append(match)",
    "assert «e» is not None, f«q»{«fr»}«q»",
    "assert «a» >= -9999 or «b»\nout.append(0)",
    "assert (\n    «r» >= 0\n), (\n    «q»no «q»\n    f«q»{«fr»}«q»\n)",
    "«N» = {«q»k«q»: «e»}\ndel «N»[«q»k«q»]\nout.append(len(«N»))",
    "«N» = «e»; del «N»",
    "«N» = [0] * 200\n«N»[«a» % 9] = «e»\nout.append(sum(«N»))",
    "def «N»(y, mpu_=«e»):\n    return y + «e» + mpu_\nout.append(«N»(«e»))",
    "def «N»():\n    «s»\n    return out\nout.append(len(«N»()))",
    "«N» = 0\ndef «M»():\n    nonlocal «N»\n    «N» += «e»\n    return «N»\n"
    "out.append((«M»(), «N»))",
    "def «N»(n):\n    if n <= 0:\n        return «e»\n    return «N»(n - 1) + «e»\n"
    "out.append(«N»(2))",
    "def «N»(y): return y + «a»\nout.append(list(map(«N», [1, «e»])))",
    "«N» = lambda y, z=«e»: y + z + «a»\nout.append(«N»(«e»))",
    "class «N»:\n    size = «e»\n    def go(self): return self.size + «e»\nout.append(«N»().go())",
    "@functools.cache\ndef «N»():\n    return «e»\nout.append(«N»() + «N»())",
    "async def «N»():\n    return «e»\nout.append(run(«N»()))",
    "def «N»():\n    yield «e»\n    yield from («e», «e»)\n    y = yield\n"
    "out.append(len(list(«N»())))",
    "«N» = «g»\nout.append(«N».size())",
    "«N» = functools.partial(max, «e»)\nout.append(«N»(«e»))",
    "«N» = «v»\nout.append(«N»())",
    "«N» = [«v», «v»]\nout.append([x() for x in «N»])",
    "«N» = [«m»]\nout.append(«N»[0].get_tensor_model_parallel_rank())",
    "«N» = «m»\nout.append(«N».get_pipeline_model_parallel_rank())",
    "out.append(apply(«v»))",
    "pg = «e»\nout.append(pg + «e»)",
    "getters = «e»\nout.append(getters + «e»)",
    "megapg = «i»\nout.append(megapg + «e»)",
    "for pg in range(2): out.append(pg + «e»)",
    "out.append([pg + «e» for pg in range(2)])",
    "out.append((lambda pg, megapg=1: pg + megapg + «a»)(2))",
    "def pg(): return «e»\nout.append(pg())",
    "model = [«e»]\nout.append(len(model) + «e»)",
    "pg_collection = {«q»n«q»: «e»}\nout.append(len(pg_collection) + «e»)",
    "tp_group = «g:get_tensor_model_parallel_group»\n"
    "out.append((tp_group.size(), «r:get_tensor_model_parallel_rank», «e»))",
    "group = «g»\nout.append(group.rank() + «e»)",
    "mpu_fake = Fake()\nout.append(mpu_fake.get_tensor_model_parallel_rank() + «e»)",
    "out.append((lambda mpu: mpu.get_tensor_model_parallel_rank())(Fake()))",
    "def «N»(parallel_state=Fake()):\n"
    "    return parallel_state.get_tensor_model_parallel_rank() + «q»«q».count(«q»a«q»)\n"
    "out.append(«N»())",
    "out.append(«q»parallel_state.get_tensor_model_parallel_rank()«q»)",
    "if False:\n    out.append(«e»)",
    # -- names that look as if groups could be had from them
    "for model in range(«i» - «i»): pass\nout.append(«e»)",
    "for model in (): pass\nout.append((«e», «r»))",
    "if «i» > 3:\n    model = 1\nout.append(«e»)",
    "if «b»:\n    model = [1]\n    out.append(«e»)\nout.append(«e»)",
    "try:\n    raise KeyError\nexcept KeyError as model:\n    out.append(«e»)\nout.append(«e»)",
    "with contextlib.nullcontext(2) as model:\n    out.append(model + «e»)",
    "model = 1\nout.append(model)\ndel model\nout.append(«e»)",
    "model: int\nout.append(«e»)",
    "out.append([«e» for model in (1, 2)])\nout.append(«e»)",
    "out.append(«e»)\nmodel = «e»\nout.append(model)",
    "model = «r»; out.append(model + «e»)",
    "def model(): return «e»\nout.append(model() + «e»)",
    "class model: size = «e»\nout.append(model.size + «e»)",
    "import json as model\nout.append(«e»)",
    "if «b»:\n    model = []\n    for «N» in range(«i»): model.append(«N»)\n"
    "else:\n    model = «i»\nout.append(«e»)",
    "if «b»:\n    model = []\nfor «N» in (): model.append(«N»)\nout.append(«e»)",
    "model = []\nfor «N» in (1, 2):\n    out.append(«e»)\n    model.append(«N»)\n"
    "out.append((«e», len(model)))",
    "for «N» in (1, 2):\n    out.append(«e»)\n    model = «N»\n    if «b»: break\nout.append(«e»)",
    "try:\n    model = [«e»]\nexcept ZeroDivisionError:\n    raise\nfinally:\n"
    "    out.append(«e»)\nout.append((model, «e»))",
    "try:\n    {}[1]\n    model = 1\nexcept KeyError:\n    out.append(«e»)\nout.append(«e»)",
    "with contextlib.suppress(KeyError):\n    {}[1]\n    model = 1\nout.append(«e»)",
    "with contextlib.nullcontext():\n    model = [«e»]\nout.append((model, «e»))",
    "while «b»:\n    model = «i»\n    out.append(«e»)\n    break\nout.append(«e»)",
    "match 3:\n    case [model]: pass\n    case _: pass\nout.append(«e»)",
    "if «i» > 3:\n    pg_collection = collection()\nout.append(«e»)",
    "pg_collection = collection()\nout.append((«e», «r»))",
    "pg_collection = None\nout.append(«e»)\npg_collection = collection()\nout.append(«e»)",
    "out.append(«e»)\npg_collection = collection()\nout.append(pg_collection.tp.size() + «e»)",
    "tp_group = «m».get_expert_tensor_parallel_group()\n"
    "out.append((tp_group.size(), «r:get_tensor_model_parallel_rank», "
    "«r:get_tensor_model_parallel_world_size», «e»))",
    "dp_group = «m».get_data_parallel_group(with_context_parallel=True)\n"
    "out.append((dp_group.size(), «r:get_data_parallel_rank», «r:get_data_parallel_world_size»))",
    "if «b»:\n    tp_group = «g:get_tensor_model_parallel_group»\n"
    "out.append(«r:get_tensor_model_parallel_rank»)",
    "out.append(«r:get_tensor_model_parallel_rank»)\n"
    "tp_group = «g:get_tensor_model_parallel_group»\n"
    "out.append((«r:get_tensor_model_parallel_rank», tp_group.size()))\n"
    "tp_group = None\nout.append(«r:get_tensor_model_parallel_rank»)",
    "cp_group = «m».get_tensor_model_parallel_group()\n"
    "out.append((cp_group.size(), «r:get_context_parallel_rank»))",
    # -- calls in other places
    "out.append((lambda: «c»)())",
    "out.append([«c» for _ in range(2)])",
    "out.append([x for x in (1, «c») if x])",
    "out.append((«c») if «b» else («c»))",
    "«N» = «c»; out.append(«N»); out.append(«c»)",
    "out.append(f«q»{«cf»}«q»)",
    "out.append(f«q»a {«fr»} {«cf»!r:>3} b«q»)",
    "out.append(apply(lambda y: («c», y + «e»), 2))",
    "def «N»(y=«c»):\n    return y\nout.append(«N»())",
    "out.append(dict(a=«c», b=«c»))",
    "with contextlib.nullcontext(«c») as «N»: out.append(«N»)",
    "class «N»:\n    size = «c»\nout.append(«N».size)",
    "if «c»: out.append(«c»)",
    "out.append(eval(«q»1 + 1«q»))",
    "import megapg as «N»\nout.append(«e»)",
    "from megatron.core import mpu as «N»\nout.append(«N».get_context_parallel_rank())\ndel «N»",
    "from megatron.core import mpu as «N»; out.append(«N».get_tensor_model_parallel_rank())",
    "if «b»: from megatron.core import mpu as «N»\n"
    "else: import megatron.core.parallel_state as «N»\n"
    "out.append(«N».get_tensor_model_parallel_rank())",
    "with contextlib.suppress(ImportError):\n    from megatron.core import mpu as «N»\n"
    "out.append(«N».get_pipeline_model_parallel_rank() + «e»)",
    "class «N»:\n    from megatron.core import mpu\n"
    "out.append(«N».mpu.get_tensor_model_parallel_rank() + «e»)",
    "class «N»:\n    def __init__(self): self.ps = «m»\n"
    "    def go(self): return self.ps.get_tensor_model_parallel_rank() + «e»\n"
    "out.append(«N»().go())",
    "from megatron.core.parallel_state import get_context_parallel_rank as «N»\n"
    "out.append(«N»() + «N»())",
    "if «b»:\n    # only a comment before\n\n    out.append(«e»)\n\n    # and behind",
    "if not «init»():\n    out.append(-1)\nelse:\n    out.append(«e»)",
    "out.append(«e» if «init»() else 0)",
    "out.append(«init»() and «e»)",
    "return (*out, «e»)",
)
_IN_ASYNC = (
    "out.append(await «N»2(«e»))",
    "async with Context(«e») as «N»:\n    out.append(«N» + «e»)",
    "async for «N» in counting(«e» % 3):\n    out.append(«N» + «e»)",
    "out.append([«N» + «e» async for «N» in counting(2) if «b»])",
)

# -- functions and classes -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """Something at the top of a module, and how it is used: with ``«N»`` and ``«i»``."""

    text: str
    uses: tuple[str, ...] = ()
    guarded: bool = False


def _unit(text: str, *uses: str, guarded: bool = False) -> _Unit:
    return _Unit(text.strip("\n"), uses, guarded)


_UNITS = (
    _unit("def «N»(a): return (a, «e»)", "«N»(«i»)"),
    _unit("def «N»(a): x = «e»; return (a, x)", "«N»(a=«i»)"),
    _unit("def «N»(): return «e»", "«N»()"),
    _unit("«N» = lambda a: a + «a»", "«N»(«i»)"),
    _unit("«N» = lambda: «r»", "«N»()"),
    _unit("«N» = lambda *a, **k: «r» + len(a)", "«N»(«i», k=«i»)"),
    _unit("«N» = functools.partial(max, «E»)", "«N»(«i»)"),
    _unit("«N» = «E»", "«N»"),
    _unit("«N» = [«E», «E»]\nfor «M» in range(2): «N».append(«E»)", "tuple(«N»)"),
    _unit("if «B»:\n    «N» = «E»\nelse:\n    «N» = 5", "«N»"),
    _unit("if «B»:\n    def «N»(a): return «e» + a\nelse:\n    def «N»(a): return «e»", "«N»(«i»)"),
    _unit(
        "try:\n    import json\n    def «N»(a):\n        return «e»\nexcept ImportError: pass",
        "«N»(3)",
    ),
    _unit(
        """
def «N»(a, b=«E», *, c=«E»):
    return (a, b, c, «e»)
""",
        "«N»(«i»)",
        "«N»(«i», «i», c=«i»)",
    ),
    _unit(
        """
def «N»(a: "int" = 3, *args: int, **kwargs: int) -> "tuple[object, ...]":
    \"\"\"Reads get_tensor_model_parallel_rank() and more.

    Args:
        a: a number.
    \"\"\"
    return (a, args, sorted(kwargs.items()), «e», «c»)
""",
        "«N»(«i», «i», k=«i»)",
        "«N»()",
        "«N»(*[1, 2], **{«q»z«q»: 3})",
    ),
    _unit(
        """
def «N»(items):
    return sum(items) + «e»

def «M»():
    return «N»(x for x in range(3)) + «N»([«e»]) + «N»(items=(y for y in (1, 2)))
""",
        "«N»([1, 2])",
        "«M»()",
    ),
    _unit(
        """
def «N»(
    a,  # the first
    b=1,  # the second, with a default
    # nothing else
):
    return (a, b, «e»)


def «M»(a):
    return «N»(
        a,  # first
        b=«e»,  # second
    ) + «N»(
        a
    ) + «N»(a,) + «N»( a , b = 2 ) + «N»(
        a  # no comma
        # at all
    )
""",
        "«M»(«i»)",
        "«N»(«i»)",
    ),
    _unit(
        """
def «N»(
    a, /,
    b, *,
    c=2
) -> tuple:
    «s»
    return (a, b, c)
""",
        "«N»(«i», «i»)",
        "«N»(«i», b=«i», c=«i»)",
    ),
    _unit("def «N»(a, *, k): return (a, k, «e»)", "«N»(«i», k=«i»)"),
    _unit("def «N»(a, *rest): return (a, rest, «e»)", "«N»(«i», «i», «i»)"),
    _unit("def «N»(*, k=1, **rest): return (k, «e»)", "«N»(j=«i»)"),
    _unit("def «N»(a, b=1, /): return (a, b, «e»)", "«N»(«i»)"),
    _unit("def «N»(a,): return (a, «e»)", "«N»(«i»,)"),
    _unit("def «N»(a, *, k=1,): return (a, k, «e»)", "«N»(«i», k=«i»,)"),
    _unit("def «N»(a, *rest,): return (a, rest, «e»)", "«N»(«i», *[«i»],)"),
    _unit("def «N»(a, **rest,): return (a, rest, «e»)", "«N»(«i», **{},)"),
    _unit(
        """
def «N»(pg, getters=2, megapg=3):
    \"\"\"Names that are something else here.\"\"\"
    return (pg, getters, megapg, «e»)
""",
        "«N»(«i»)",
        "«N»(pg=«i»)",
    ),
    _unit("def «N»(model): return (model, «e», «e»)", "«N»(«i»)", "«N»(model=None)"),
    _unit("def «N»(model=None, config=None): return («e», model is None)", "«N»()", "«N»(«i»)"),
    _unit("def «N»(a: torch.nn.Module): return (a, «e», «e»)", "«N»(«i»)", "«N»(None)"),
    _unit(
        """
class «N»:
    model = «i»

    def names(self): return self.model.parameters(), self.unwrapped_models

    def go(self, a): return (a, self.model, «e», «e»)
""",
        "«N»().go(«i»)",
    ),
    _unit(
        """
def «N»(a, pg_collection=None):
    if pg_collection is None:
        return (a, «e»)
    return (a, «e», «e»)
""",
        "«N»(«i»)",
        "«N»(«i», collection())",
    ),
    _unit(
        """
def «N»(a, *, pg_collection):
    return (a, «r:get_tensor_model_parallel_rank», «e»)
""",
        "«N»(«i», pg_collection=collection())",
    ),
    _unit(
        """
def «N»(a, tp_group=None):
    if tp_group is None:
        tp_group = «g:get_tensor_model_parallel_group»
    return (a, tp_group.size(), «r:get_tensor_model_parallel_rank», «e»)
""",
        "«N»(«i»)",
        "«N»(«i», tp_group=collection().tp)",
    ),
    _unit(
        """
def «N»(a, group=None):
    group = group or «g»
    return (a, group.size(), «e»)
""",
        "«N»(«i»)",
    ),
    _unit(
        """
def «N»(n):
    if n <= 0:
        return («e»,)
    return (*«N»(n - 1), «e»)
""",
        "«N»(2)",
    ),
    _unit(
        """
def «N»(n):
    return «M»(n - 1) + «e» if n > 0 else «e»

def «M»(n):
    return «N»(n - 1) + «e» if n > 0 else «e»
""",
        "«N»(3)",
        "«M»(2)",
    ),
    _unit(
        """
def «N»(a):
    return a + «e»

«M» = {«q»one«q»: «N», «q»two«q»: lambda a: «e»}

def «O»(a):
    table = [«N», functools.partial(«N», 1)]
    return (
        «M»[«q»one«q»](a), «M»[«q»two«q»](a), table[0](a), table[1](),
        apply(«N», a), list(map(«N», [1, a])), sorted([3, 1], key=«N»), apply(f=«N»),
    )[:-1] if a is None else (apply(«N», a), functools.reduce(lambda x, y: x + «N»(y), [1, 2]))
""",
        "«O»(«i»)",
        "«M»[«q»two«q»](1)",
    ),
    _unit(
        """
def «N»(a):
    return a + «e»

def «M»(f, a):
    return f(a) + «e»

def «O»(a):
    return («M»(«N», a), «M»(f=«N», a=a), «M»(lambda x: «N»(x) + «a», a))
""",
        "«O»(«i»)",
    ),
    _unit(
        """
def «N»(a):
    return (a, «e»)

def «M»(a, how, model=None):
    if how == 1:
        f = «N»
    elif how == 2:
        def f(**given): return «N»(**given)
    else:
        f = «N» if how else len
    g = «N»
    return (f(a=a), [f(a=g(x)) for x in (a, 1)], (lambda: g(a))(), «e»)

def «O»(a, how):
    f = (
        «N»  # as it is
    )
    h = «N»
    return («M»(a, how), f(a), apply(h, a), «e»)
""",
        "«M»(«i», 1)",
        "«M»(«i», 2, None)",
        "«O»(«i», 3)",
    ),
    _unit(
        """
@wrapping
def «N»(a, b=2):
    return (a, b, «e»)

@wrapping  # with a comment
@functools.lru_cache(maxsize=None)
def «M»(a):
    return («N»(a), «e»)
""",
        "«N»(«i»)",
        "«M»(«i»)",
    ),
    _unit(
        """
@fixed
def «N»(a):
    return (a, «e», «c»)

def «M»(a):
    return («N»(a), «e»)
""",
        "«N»(«i»)",
        "«M»(«i»)",
    ),
    _unit(
        """
@registering(«q»«N»«q», size=«E»)
def «N»(a):
    return (a, «e»)
""",
        "registered(«q»«S»«q», «i»)",
        "«N»(«i»)",
    ),
    _unit(
        """
@contextlib.contextmanager
def «N»(a):
    yield a + «e»

def «M»(a):
    with «N»(a) as x:
        return (x, «e»)
""",
        "«M»(«i»)",
    ),
    _unit(
        """
def «N»(a):
    yield «e»
    for x in range(a % 3):
        yield x + «e»
    return «e»

def «M»(a):
    return (yield from «N»(a)) or (yield «e»)
""",
        "list(«N»(«i»))",
        "list(«M»(«i»))",
    ),
    _unit(
        """
async def «N»2(a):
    return a + «e»

async def «N»(a):
    out = []
    «as»
    «s»
    return tuple(out) + (await «N»2(a),)
""",
        "run(«N»(«i»))",
    ),
    _unit(
        """
async def «N»(a):
    for x in range(a % 3):
        yield x + «e»

async def «M»(a):
    return [y + «e» async for y in «N»(a)]
""",
        "run(«M»(«i»))",
    ),
    _unit(
        """
«M» = 0

def «N»(a):
    global «M»
    «M» += «e»
    return (a, «M»)
""",
        "«N»(«i»)",
        "«M»",
    ),
    _unit(
        """
def «N»(a):
    global pg_«N», megapg_«N»
    pg_«N» = a + «e»
    megapg_«N» = pg_«N» + «e»
    return megapg_«N»
""",
        "«N»(«i»)",
    ),
    # -- where nothing may be asked before it is known that there is something
    _unit(
        """
def «N»(a):
    if not «init»():
        return (a,)
    «s»
    return (a, «e», «c»)
""",
        "«N»(«i»)",
        guarded=True,
    ),
    _unit("def «N»(a): return (a, («e») if «init»() else 0)", "«N»(«i»)", guarded=True),
    _unit("def «N»(a): return (a, «init»() and «r»)", "«N»(«i»)", guarded=True),
    _unit(
        """
def «N»(a):
    try:
        return (a, «r:get_tensor_model_parallel_rank»)
    except Exception:
        return (a, -1)
""",
        "«N»(«i»)",
        guarded=True,
    ),
    _unit(
        """
def «N»(a):
    size = 1
    if «init»():
        size = «e»
    if size > 2:
        size += («e») if «init»() else 0
    return (a, size)

def «M»(a):
    return («N»(a), «c»)
""",
        "«N»(«i»)",
        "«M»(«i»)",
        guarded=True,
    ),
    _unit(
        """
class «N»:
    def __init__(self, a):
        self.a = a
        self.size = «r» if «init»() else 1

    def go(self, b):
        if «init»() and b:
            return (self.a, «e»)
        return (self.a, b)
""",
        "«N»(«i»).go(«i»)",
        guarded=True,
    ),
    # -- classes
    _unit(
        """
class «N»:
    \"\"\"With a size of its own.\"\"\"

    size = «E»

    def __init__(self, a):
        self.a = a + «e»

    def go(self, b=1):
        «s»
        return (self.a, self.size, b, «e», «c»)
""",
        "«N»(«i»).go(«i»)",
        "«N»(«i»).go()",
        "«N».size",
        "«N».go(«N»(1))",
    ),
    _unit(
        """
class «N»(object):
    def __init__(self, a, *args, **kwargs):
        super().__init__()
        self.a, self.more = a, (args, sorted(kwargs))

    def go(self):
        return (self.a, self.more, «e»)

class «M»(«N»):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = «e»

    def go(self):
        return (super().go(), self.size, «e»)

class «O»(«M»):
    def go(self): return «M».go(self) + («e»,)
""",
        "«N»(«i»).go()",
        "«M»(«i», k=«i»).go()",
        "«O»(«i», «i»).go()",
        "[x(1).go() for x in («N», «M», «O»)]",
    ),
    _unit(
        """
class «N»:
    def go(self, a):
        return a + «e»

class «M»(«N»):
    def go(self, a):
        return a + 1

class «O»(«N»):
    def go(self, a, b=0):
        return super().go(a) + b + «e»

def «N»_all(a):
    return [x().go(a) for x in («N», «M», «O»)]
""",
        "«N»_all(«i»)",
        "«O»().go(«i»)",
        "«M»().go(«i»)",
    ),
    _unit(
        """
class «N»:
    @staticmethod
    def one(a):
        return a + «e»

    @classmethod
    def two(cls, a):
        return cls.one(a) + «e»

    @property
    def three(self):
        return self.two(1) + «e»

    @functools.cached_property
    def four(self): return «e»

    def __call__(self, a):
        return (self.one(a), self.three, self.four, «e»)

    def __len__(self): return «r» % 9

    def __getitem__(self, i): return i + «e»

    def __enter__(self): return «e»

    def __exit__(self, *error): return None

    def __eq__(self, other): return «a» == other

    def __iter__(self):
        yield «e»
""",
        "«N»()(«i»)",
        "«N».one(«i»)",
        "«N».two(«i»)",
        "«N»().three",
        "len(«N»())",
        "«N»()[«i»]",
        "list(«N»())",
        "«N»() == 2",
    ),
    _unit(
        """
class «N»:
    __slots__ = («q»a«q», «q»b«q»)

    def __init__(self, a):
        self.a = a
        self.b = «e»

    def go(self):
        return (self.a, self.b, «e»)
""",
        "«N»(«i»).go()",
    ),
    _unit(
        """
class «N»:
    def __getattr__(self, name):
        if name == «q»special«q»:
            return «e»
        raise AttributeError(name)

    def go(self): return self.special + «e»
""",
        "«N»().go()",
    ),
    _unit(
        """
class «N»:
    def __new__(cls, a):
        self = super().__new__(cls)
        self.size = «e»
        return self

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.extra = 3

    def go(self): return self.size + «e»

class «M»(«N»):
    pass
""",
        "«N»(«i»).go()",
        "«M»(«i»).go() + «M».extra",
    ),
    _unit(
        """
class «N»:
    class Inner:
        size = 2

        def go(self, a): return a + «e»

    def go(self, a):
        class Local(self.Inner):
            def go(self, a): return super().go(a) + «e»
        return (self.Inner().go(a), Local().go(a))
""",
        "«N»().go(«i»)",
        "«N».Inner().go(«i»)",
    ),
    _unit(
        """
class «N»:
    def __init__(self): self.go = self._go
    def _go(self, a): return a + «e»
    helper = lambda self, a: self._go(a) + «a»
    other = _go
""",
        "«N»().go(«i»)",
        "«N»().helper(«i»)",
        "«N»().other(«i»)",
    ),
    _unit(
        """
class «N»(abc.ABC):
    @abc.abstractmethod
    def go(self, a): ...

    def both(self, a):
        return self.go(a) + «e»

class «M»(«N»):
    def go(self, a):
        return a + «e»
""",
        "«M»().both(«i»)",
    ),
    _unit(
        """
@dataclasses.dataclass
class «N»:
    a: int
    size: int = «E»
    late: int = dataclasses.field(default_factory=lambda: «e»)

    def __post_init__(self):
        self.sum = self.a + «e»

    def go(self):
        return (self.a, self.size, self.late, self.sum, «e»)
""",
        "«N»(«i»).go()",
        "dataclasses.astuple(«N»(«i»))",
        "repr(dataclasses.replace(«N»(«i»), size=4))",
    ),
    _unit(
        """
@dataclasses.dataclass(frozen=True)
class «N»:
    a: int

    def go(self): return self.a + «e»

    @classmethod
    def make(cls): return cls(«e»)
""",
        "«N»(«i»).go()",
        "«N».make().a",
        "hash(«N»(1)) == hash(«N»(1))",
    ),
    _unit(
        """
class «N»(enum.IntEnum):
    ONE = 1 + abs(«E»)

    @property
    def more(self): return self.value + «e»
""",
        "«N».ONE.more",
    ),
    _unit(
        """
class «N»(typing.NamedTuple):
    a: int
    b: int = 2

    def go(self): return self.a + self.b + «e»
""",
        "«N»(«i»).go()",
        "tuple(«N»(«i»))",
    ),
    _unit(
        """
class «N»:
    def __init__(self, pg_collection=None):
        self.pg_collection = pg_collection or collection()

    def go(self): return (self.pg_collection.tp.rank(), «e»)
""",
        "«N»().go()",
    ),
    _unit(
        """
class «N»:
    def __init__(self, model):
        self.model = model
        self.size = «e»

    def go(self): return (self.size, «e»)

    def copied(self): return copy.deepcopy(self).go()
""",
        "«N»(«i»).go()",
        "«N»(None).copied()",
    ),
    _unit(
        """
class «N»(torch.nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        self.size = «e»
        self.tp_group = «g:get_tensor_model_parallel_group»

    def forward(self, x):
        return (x, self.a, self.size, self.tp_group.size(), «e», «r:get_tensor_model_parallel_rank»)

class «M»(torch.nn.Module):
    def __init__(self, a):
        local = «e»
        super().__init__()
        self.inner = «N»(a + local)
        self.model = self.inner

    def forward(self, x):
        return (self.inner(x), self.model.size, «e»)
""",
        "«N»(«i»)(«i»)",
        "«M»(«i»)(«i»)",
        "«M»(«i»).inner(2)",
    ),
    _unit(
        """
class «N»(torch.nn.Module):
    def forward(self, x):
        «s»
        return (x, «e»)

    def extra_repr(self): return f«q»{«fr»}«q»
""",
        "«N»()(«i»)",
        "«N»().extra_repr()",
    ),
    _unit(
        """
class «N»(torch.nn.Linear):
    def __init__(self, a, *args, **kwargs):
        super().__init__(«i», 2, bias=False)
        self.a = a

    def forward(self, x):
        return (self.weight.numel(), self.a, «e»)
""",
        "«N»(«i»)(«i»)",
    ),
    _unit(
        """
class «N»(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        ctx.size = «r»
        return x * a + float(«e»)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.size + int(«b») + «r», None

def «M»(a):
    x = torch.ones(1, requires_grad=True)
    y = «N».apply(x, a)
    y.backward()
    return (y.item(), x.grad.item(), «e»)
""",
        "«M»(«i»)",
    ),
    _unit(
        """
class «N»A:
    def __init__(self, a=1, **kwargs):
        super().__init__(**kwargs)
        self.a = a + «e»

class «N»B:
    def __init__(self, b=2, **kwargs):
        super().__init__(**kwargs)
        self.b = b + «e»

class «N»(«N»A, «N»B):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.c = «e»
""",
        "sorted(vars(«N»(a=«i»)))[0] == «q»a«q», «N»(a=1).a, «N»(b=«i»).b, «N»().c",
    ),
    _unit(
        """
class «N»:
    registry = {}

    def __init_subclass__(cls): «N».registry[cls.__name__] = cls

class «M»(«N»):
    def __init__(self, a): self.a = a + «e»

def «O»(a):
    return [kind(a).a for kind in «N».registry.values()]
""",
        "«O»(«i»)",
    ),
    _unit(
        """
def «N»(cls, a):
    return cls(a).size

class «M»:
    def __init__(self, a):
        self.size = a + «e»

def «O»(a):
    return («N»(«M», a), functools.partial(«M», a)().size, [«M»][0](a).size)
""",
        "«O»(«i»)",
    ),
    # -- what looks as if groups could be had from it
    _unit(
        """
def «N»(a, tp_group=None):
    rank = «r:get_tensor_model_parallel_rank»
    if tp_group is None:
        tp_group = «g:get_tensor_model_parallel_group»
    return (a, rank, «r:get_tensor_model_parallel_world_size», «e»)

def «M»(a):
    return («N»(a), «N»(a, tp_group=«g:get_tensor_model_parallel_group»), «e»)
""",
        "«N»(«i»)",
        "«M»(«i»)",
    ),
    _unit(
        """
def «N»(a, tp_group):
    return (a, tp_group.size(), «r:get_expert_tensor_parallel_rank», «e»)

def «M»(a):
    return «N»(a, «m».get_expert_tensor_parallel_group())
""",
        "«M»(«i»)",
    ),
    _unit(
        """
def «N»(a, dp_group=None):
    return (a, dp_group is None, «r:get_data_parallel_rank», «r:get_data_parallel_world_size»)

def «M»(a):
    return «N»(a, dp_group=None) + «N»(a)
""",
        "«N»(«i»)",
        "«M»(«i»)",
    ),
    _unit(
        """
class «N»:
    def pg_collection(self):
        return collection()

    def go(self, a):
        return (self.pg_collection().tp.rank(), «e», a)
""",
        "«N»().go(«i»)",
    ),
    _unit(
        """
class «N»:
    @property
    def pg_collection(self):
        return collection()

    @property
    def model(self):
        raise RuntimeError(«q»no model«q»)

    def go(self, a):
        return («e», «e», a)
""",
        "«N»().go(«i»)",
    ),
    _unit(
        """
class «N»:
    pg_collection = None

    def __init__(self, a):
        self.model = None
        if a > 2:
            self.pg_collection = collection()

    def go(self):
        return («e», «e»)
""",
        "«N»(«i»).go()",
    ),
    _unit(
        """
class «N»:
    def __init__(self, a):
        self.size = self.ask() + a
        self.pg_collection = collection()

    def ask(self):
        return «e»
""",
        "«N»(«i»).size",
    ),
    _unit(
        """
class «N»(torch.nn.Module):
    def __init__(self, a):
        self.early = self.ask()
        super().__init__()
        self.pg_collection = collection()
        self.late = self.ask()

    def ask(self):
        return «e»

    def forward(this, a):
        return (this.early, this.late, this.ask(), a)
""",
        "«N»(«i»)(«i»)",
    ),
    _unit(
        """
@dataclasses.dataclass
class «N»:
    tp_group: object = None
    pg_collection: object = None

    def go(self): return («r:get_tensor_model_parallel_rank», «e»)
""",
        "«N»().go()",
    ),
    _unit(
        """
class «N»:
    def __init__(self, a, **kwargs):
        self.a = a
        for name, value in kwargs.items():
            setattr(self, name, value)

    def go(self): return (self.a, «e», sorted(vars(self)))

class «M»(«N»):
    def __init__(self, a):
        self.size = «e»
        «N».__init__(self, a, more=«e»)
""",
        "«N»(«i»).go()",
        "«M»(«i»).go()[:2]",
    ),
    _unit(
        """
def «N»(this, a): return a + «e»

class «M»:
    go = «N»

    def both(me, a):
        me = me
        return me.go(a) + «e»

«M».later = lambda self, a: self.go(a) + «a»
""",
        "«M»().both(«i»)",
        "«M»().later(«i»)",
    ),
    _unit(
        """
def «N»(a):
    def inner(b):
        def innermost(c):
            return a + b + c + «e»
        return innermost(1) + «e»
    return inner(2)

def «M»(a):
    total = 0
    for step in («N», lambda a: «N»(a) + «a»):
        total += step(a)
    return total
""",
        "«N»(«i»)",
        "«M»(«i»)",
    ),
    _unit(
        """
def «N»(a):
    return a + «e»

def «N»_twice(a): return «N»(«N»(a)) + «N»((«N»)(a)) + «N» (a)

def «N»(a, b=1):  # again, and this one counts
    return a + b + «e»
""",
        "«N»_twice(«i»)",
        "«N»(«i»)",
    ),
    _unit(
        """
def «N»(a, f=None):
    return (a, «e») if f is None else f(a)

def «M»(a):
    return «N»(a, f=«N»), «N»(a, «N»), «N»(f=None, a=a), [*map(«N», (1, 2))]
""",
        "«M»(«i»)",
    ),
    _unit(
        """
def «N»(): from megatron.core import mpu as x; return x.get_tensor_model_parallel_rank()
class «M»: from megatron.core import mpu
""",
        "«N»()",
        "«M».mpu.get_tensor_model_parallel_rank()",
    ),
    _unit(
        """
def «M»():
    global «N»_ps
    from megatron.core import parallel_state as «N»_ps

def «N»(a):
    «M»()
    return («N»_ps.get_tensor_model_parallel_rank(), a)
""",
        "«N»(«i»)",
    ),
    _unit(
        """
def «N»(
    a, b=2, *args,
    c: int = 3, # é
    **kwargs # the rest
): return (
    a, b, args, c, sorted(kwargs), «e»
)

def «M»(a): return «N»(
    a, *[1, 2], c=4,
    d=«N»(a, # é
    )
)
""",
        "«M»(«i»)",
    ),
    _unit(
        """
def «N»(a):
    return a + «e»
«N».extra = 1
«N» = «N»

def «M»(a):
    «O» = «N»
    return «O»(a) + «N».extra + globals()[«q»«N»«q»](a)
""",
        "«M»(«i»)",
    ),
    _unit(
        """
def «N»(a, /, *, pg=1, megapg=2):
    return (a, pg, megapg, «e»)

def «M»(a):
    pg, megapg = «N»(a, pg=a)[1:3]
    return «N»(a, megapg=megapg, **dict(pg=pg))
""",
        "«M»(«i»)",
    ),
    # -- what takes the place of the globals for a while
    _unit(
        """
def «N»(a):
    «mod».set_tensor_model_parallel_rank(a)
    try:
        return («r:get_tensor_model_parallel_rank», «c»)
    finally:
        «mod».set_tensor_model_parallel_rank(None)
""",
        "«N»(«i»)",
    ),
    _unit(
        """
def «N»(a):
    before = «mod».get_context_parallel_rank
    «mod».get_context_parallel_rank = lambda: 77
    try:
        return («r:get_context_parallel_rank», a)
    finally:
        «mod».get_context_parallel_rank = before
""",
        "«N»(«i»)",
    ),
)
_NEW_UNITS = (
    _unit("def «N»[T](a: T) -> tuple[T, int]: return (a, «e»)", "«N»(«i»)"),
    _unit("def «N»[T: (int, str), *Ts, **P](a: T, *, k: int = 1): return (a, k, «e»)", "«N»(«i»)"),
    _unit(
        """
class «N»[T]:
    def __init__(self, a: T): self.a = «e»

    def go[U](self, b: U) -> U: return (self.a, b, «e»)
""",
        "«N»[int](«i»).go(«i»)",
    ),
    _unit("type «N»Alias = «r».__class__\ndef «N»(a: «N»Alias): return («e»)", "«N»(«i»)"),
)
_OVERRIDING = ("set_tensor_model_parallel_rank", "= lambda: 77")

# -- modules ---------------------------------------------------------------------------------------

_KIT = '''
"""What the generated modules share. None of it is Megatron's."""

import functools


def run(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("nothing is waited for")


def apply(f, *args, **kwargs):
    return f(*args, **kwargs)


def wrapping(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return ("wrapped", f(*args, **kwargs))

    return wrapper


def fixed(f):
    def wrapper(a):
        return ("fixed", f(a))

    return wrapper


_registry = {}


def registering(name, size):
    def decorate(f):
        _registry[name] = f, size
        return f

    return decorate


def registered(name, a):
    f, size = _registry[name]
    return (f(a), size)


class Fake:
    def get_tensor_model_parallel_rank(self):
        return 55


class Context:
    def __init__(self, value):
        self.value = value

    async def __aenter__(self):
        return self.value

    async def __aexit__(self, *error):
        return None


async def counting(n):
    for i in range(n):
        yield i


def collection():
    import megapg

    return megapg.from_parallel_state()
'''

_STANDARD = (
    "import abc, contextlib, copy, dataclasses, enum, functools, typing",
    "import abc\nimport contextlib\nimport copy\nimport dataclasses\nimport enum\n"
    "import functools\nimport typing",
)
_FROM_KIT = (
    "from {dots}kit import (\n    Context,\n    Fake,\n    apply,  # f(x)\n    collection,\n"
    "    counting,\n    fixed,\n    registered,\n    registering,\n    run,\n    wrapping,\n)"
)
# import statement -> how a getter is spelled behind it. Where the statement has NAMES, they are
# imported one by one.
_IMPORTS = (
    ("from megatron.core import parallel_state", "parallel_state"),
    ("from megatron.core import parallel_state", "parallel_state"),
    ("from megatron.core import mpu", "mpu"),
    ("from megatron.core import mpu", "mpu"),
    ("from megatron.core import parallel_state as ps", "ps"),
    ("from megatron.core import mpu as _mpu, parallel_state as _ps", "_mpu"),
    ("import megatron.core.parallel_state as mcore_ps", "mcore_ps"),
    ("import megatron.core.parallel_state", "megatron.core.parallel_state"),
    ("import os, megatron.core.parallel_state as ps1, sys", "ps1"),
    ("import os; from megatron.core import mpu as ps2; import sys", "ps2"),
    ("import megatron.core as mc", "mc.mpu"),
    ("from megatron import core", "core.parallel_state"),
    ("from megatron.core import (\n    mpu,  # the old name\n)", "mpu"),
    ("from megatron.core import (mpu,\n    parallel_state as ps3)", "ps3"),
    ("from megatron.core import \\\n    parallel_state", "parallel_state"),
    ("try:\n    from megatron.core import mpu\nexcept ImportError:\n    mpu = None", "mpu"),
    (
        "try:\n    from megatron.core import mpu\n    HAVE = True\n"
        "except ImportError:\n    HAVE = False",
        "mpu",
    ),
    ("try: from megatron.core import mpu\nexcept ImportError: pass", "mpu"),
    ("if True: from megatron.core import mpu as ps6", "ps6"),
    ("from megatron.core import mpu, tensor_parallel", "mpu"),
    ("import megapg\nfrom megatron.core import mpu", "mpu"),
    ("from megapg import resolve\nfrom megatron.core import mpu", "mpu"),
    ("import megapg as getters\nfrom megatron.core import mpu", "mpu"),
    ("if typing.TYPE_CHECKING:\n    import megapg\nfrom megatron.core import mpu", "mpu"),
    (
        "try:\n    import megapg\nexcept ImportError:\n    megapg = None\n"
        "from megatron.core import mpu",
        "mpu",
    ),
    ("from megatron.core import mpu  # noqa: F401", "mpu"),
    ("__all__ = ['mpu']\nfrom megatron.core import mpu", "mpu"),
    ("try:\n    from megatron.core import mpu as ps4\nexcept ImportError: ps4 = None", "ps4"),
    ("if True:\n    from megatron.core import parallel_state as ps5", "ps5"),
    ("from megatron.core import mpu\nalias = mpu", "alias"),
    ("from megatron.core import mpu\nalias2 = mpu if mpu is not None else None", "alias2"),
    ("from megatron.core.parallel_state import *", ""),
    ("from megatron.core.parallel_state import NAMES", "NAMES"),
    ("from megatron.core.parallel_state import NAMES", "NAMES"),
    ("if typing.TYPE_CHECKING:\n    from megatron.core import parallel_state", "LAZY"),
    ("", "LAZY"),
)
_LAZY = (
    ("from megatron.core import parallel_state", "parallel_state"),
    ("from megatron.core import mpu", "mpu"),
    ("import megatron.core.parallel_state as lazy_ps", "lazy_ps"),
    ("from megatron.core import mpu as m, parallel_state", "m"),
)


class _Module:
    """A module in the making."""

    def __init__(self, parts: tuple[str, ...], lazy: bool) -> None:
        self.parts = parts
        self.header: list[str] = []
        self.units: list[str] = []
        self.roots: list[str] = []  # names that stand for parallel_state
        self.singles: dict[str, str] = {}  # getters imported one by one
        self.imported: dict[str, str] = {}  # dotted name of a function -> its name here
        self.lazy = lazy
        self.lenders: list[_Module] = []  # modules that getters are imported from
        self.borrowed: dict[str, str] = {}

    @property
    def name(self) -> str:
        return ".".join((PACKAGE, *self.parts))

    @property
    def dots(self) -> str:
        return "." * len(self.parts)

    def relative(self, other: _Module) -> str:
        """How to say the other one in ``from ... import``."""
        return self.dots + ".".join(other.parts)


@dataclass(frozen=True)
class _Use:
    """How something at the top of a module is used."""

    home: _Module
    name: str
    text: str  # with «N» and «i», and «S» for the name alone
    cost: int
    guarded: bool
    here_only: bool = False  # it has other names of its module, too


class _Scope:
    """Where an expression stands."""

    def __init__(self, module: _Module, guarded: bool, names: Mapping[str, str]) -> None:
        self.module, self.guarded, self.names = module, guarded, dict(names)
        self.flat = False  # nothing that takes several lines, and no strings
        self.at_import = False
        self.no_walrus = False
        self.lazy = ""  # what an import in the function makes of parallel_state
        self.depth = 0
        self.cost = 1


_HOLE = re.compile(r"«(\w+)(?::(\w+))?»")
_MOST = 60  # calls that a function comes to, with all that it calls


class _Maker:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.modules: list[_Module] = []
        self.uses: list[_Use] = []
        self.fresh = 0
        self.reads_at_import = self.random.random() < 0.6
        self.read_at_import = False
        self.overriding = self.random.random() < 0.1

    def make(self) -> Package:
        count = self.random.choice((1, 1, 2, 2, 3, 4, 5))
        for index in range(count):
            parts = ("sub", f"m{index}") if self.random.random() < 0.2 else (f"m{index}",)
            self.modules.append(self._module(parts))
        if count > 1 and self.random.random() < 0.3:
            self._across()
        files = {"__init__.py": self._init(), "kit.py": _KIT.lstrip().encode()}
        if any(len(module.parts) > 1 for module in self.modules):
            files["sub/__init__.py"] = b""
        for module in self.modules:
            files["/".join(module.parts) + ".py"] = self._bytes(module)
        drivers = [
            Driver(use.home.name, self._driven(use), use.guarded and not self.read_at_import)
            for use in self.uses
        ]
        text = b"".join(files.values()).decode("latin-1")
        overrides = any(word in text for word in _OVERRIDING)
        return Package(self.seed, files, tuple(drivers), count, overrides)

    def _driven(self, use: _Use) -> str:
        number = lambda match: str(self.random.randrange(1, 4))  # noqa: E731
        text = use.text.replace("«N»", use.name).replace("«S»", use.name)
        return re.sub("«i»", number, text).replace("«q»", "'")

    def _init(self) -> bytes:
        lines = ['"""A generated package."""']
        if self.random.random() < 0.2:
            lines += [f"from . import {self.modules[0].parts[0]}"]
        return "\n".join(lines).encode() + b"\n"

    # -- modules -----------------------------------------------------------------------------

    def _module(self, parts: tuple[str, ...]) -> _Module:
        module = _Module(parts, False)
        if self.random.random() < 0.4:
            module.header.append('"""Reads get_tensor_model_parallel_rank(), like others."""')
        if self.random.random() < 0.2:
            module.header.append("from __future__ import annotations")
        module.header += [self.random.choice(_STANDARD), "import torch"]
        module.header.append(_FROM_KIT.format(dots=module.dots))
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self._import(module)
        if self.random.random() < 0.1:
            name = self.random.choice(("pg", "getters", "megapg", "pg_collection", "model"))
            module.header.append(f"{name} = 5")
        for _ in range(self.random.choice((1, 2, 3, 4, 6, 9))):
            module.units.append(self._unit(module))
        return module

    def _import(self, module: _Module) -> None:
        others = [other for other in self.modules if other.roots]
        if others and self.random.random() < 0.3:
            other = self.random.choice(others)
            root = self.random.choice(other.roots)
            if root == "NAMES":
                module.lenders.append(other)
                module.roots.append(root)
            elif root == "":
                module.header.append(f"from {module.relative(other)} import *")
                module.roots.append(root)
            elif "." not in root and self.random.random() < 0.7:
                here = self.random.choice((root, f"{root}_again"))
                said = root if here == root else f"{root} as {here}"
                where = self.random.choice((module.relative(other), other.name))
                module.header.append(f"from {where} import {said}")
                module.roots.append(here)
            elif self.random.random() < 0.5:
                module.header.append(f"import {other.name} as other_{other.parts[-1]}")
                module.roots.append(f"other_{other.parts[-1]}.{root}")
            else:
                module.header.append(f"import {other.name}")
                module.roots.append(f"{other.name}.{root}")
            return
        statement, root = self.random.choice(_IMPORTS)
        if statement:
            module.header.append(statement)
        if root == "LAZY":
            module.lazy = True
        elif root not in ("NAMES", ""):
            module.roots.append(root)
        else:
            module.roots.append(root)

    def _across(self) -> None:
        """Two functions in two modules that call each other."""
        one, other = self.random.sample(self.modules, 2)
        self.fresh += 1
        ping, pong = f"ping{self.fresh}", f"pong{self.fresh}"
        for module, name, called, there in ((one, ping, pong, other), (other, pong, ping, one)):
            module.units.append(
                self._filled(
                    f"def {name}(n):\n    from {module.relative(there)} import {called}\n"
                    f"    if n <= 0:\n        return («e»,)\n    return («e», {called}(n - 1))",
                    _Scope(module, False, {}),
                )
            )
            self.uses.append(_Use(module, name, "«N»(3)", 4, False))

    def _bytes(self, module: _Module) -> bytes:
        if module.singles:
            names = [
                name if name == here else f"{name} as {here}"
                for name, here in module.singles.items()
            ]
            self.random.shuffle(names)
            listed = self.random.choice(
                (
                    ", ".join(names),
                    "(\n    " + ",\n    ".join(names) + ",\n)",
                    "(  # what is read\n    " + ",  # one\n    ".join(names) + "\n)",
                    "(" + ", ".join(names) + ")",
                )
            )
        header = [f"from megatron.core.parallel_state import {listed}"] if module.singles else []
        whole = [line for line in module.header if "NAMES" not in line]
        kit = next(i for i, line in enumerate(whole) if "kit import" in line)
        at = self.random.randrange(kit + 1, len(whole) + 1)
        text = "\n".join([*whole[:at], *header, *whole[at:]]) + "\n\n\n"
        between = self.random.choice(("\n\n\n", "\n\n\n", "\n", "\n\f\n", "\n\n# ---\n\n"))
        text += between.join(module.units) + "\n"
        return self._written(text)

    def _written(self, text: str) -> bytes:
        chance = self.random.random
        if chance() < 0.15:
            tab = self.random.choice(("\t", "  ", " "))
            text = re.sub(r"^(?:    )+", lambda match: tab * (len(match[0]) // 4), text, flags=re.M)
        if chance() < 0.1:
            text = text.rstrip("\n")
        elif chance() < 0.1:
            text += "\n\n# é the end\n"
        encoding, mark = "utf-8", b""
        if chance() < 0.08:
            encoding = "latin-1"
            text = "# -*- coding: latin-1 -*-\n# " + "é" * 3 + "\n" + text
        elif chance() < 0.08:
            mark = b"\xef\xbb\xbf"
        elif chance() < 0.1:
            text = "#!/usr/bin/env python\n" + text
        if chance() < 0.15:
            text = text.replace("\n", "\r\n")
        return mark + text.encode(encoding)

    # -- units -------------------------------------------------------------------------------

    def _unit(self, module: _Module) -> str:
        chance = self.random.random()
        if chance < 0.4:
            return self._function(module)
        units = _UNITS + _NEW_UNITS if _TYPE_PARAMETERS else _UNITS
        while True:
            unit = self.random.choice(units)
            if any(word in unit.text for word in _OVERRIDING) and not self.overriding:
                continue
            if not self.reads_at_import and re.search("«[BE]»", unit.text):
                continue
            break
        names = self._names()
        scope = _Scope(module, unit.guarded, names)
        text = self._filled(unit.text, scope)
        for use in unit.uses:
            self._used(module, names, use, scope)
        return text

    def _used(self, module: _Module, names: Mapping[str, str], text: str, scope: _Scope) -> None:
        said = re.sub("«([MO])»", lambda match: names[match[1]], text)
        cost = scope.cost + 1
        here = said != text or re.search(r"«N»\w", text) is not None
        self.uses.append(_Use(module, names["N"], said, cost, scope.guarded, here))

    def _names(self) -> dict[str, str]:
        self.fresh += 1
        stem = self.random.choice(("f", "f", "f", "load", "é", "pgs", "get_rank_of"))
        names = {"N": f"{stem}{self.fresh}"}
        return {**names, "M": f"{names['N']}_m", "O": f"{names['N']}_o"}

    def _function(self, module: _Module) -> str:
        """A function with any signature and any statements."""
        names = self._names()
        scope = _Scope(module, False, names)
        parameters, arguments = self._signature(scope)
        lines = []
        if self.random.random() < 0.3:
            lines.append('"""It reads mpu.get_tensor_model_parallel_rank(), and more."""')
        if module.lazy or self.random.random() < 0.15:
            statement, scope.lazy = self.random.choice(_LAZY)
            lines.append(statement)
        if self.random.random() < 0.2:
            lines.append("# what is read")
        lines.append("out = []")
        for _ in range(self.random.choice((1, 2, 3, 5, 8))):
            lines.append(self._statement(scope))
        lines.append("return tuple(out)")
        body = "\n".join(lines)
        returns = self.random.choice(("", "", " -> tuple", " -> 'tuple[int, ...]'"))
        self._used(module, names, f"«N»({arguments})", scope)
        head = f"def {names['N']}({parameters}){returns}:"
        return head + "\n" + _indented(body, 1)

    def _signature(self, scope: _Scope) -> tuple[str, str]:
        pool = ["a", "b", "x", "n", "model", "pg", "megapg", "getters", "config", "ünit", "mod"]
        count = self.random.choice((0, 1, 1, 2, 3))
        names = self.random.sample(pool, count)
        parameters, arguments = [], []
        for name in names:
            note = self.random.choice(("", "", ": int", ": 'int'"))
            parameters.append(name + note)
            arguments.append(
                self.random.choice(("«i»", f"{name}=«i»")) if "=" in "".join(arguments) else "«i»"
            )
        arguments = [
            argument
            if "=" in argument or not any("=" in each for each in arguments[:i])
            else f"{names[i]}=«i»"
            for i, argument in enumerate(arguments)
        ]
        for name in self.random.sample(("d1", "d2"), self.random.choice((0, 0, 1, 2))):
            default = (
                self._filled("«E»", scope)
                if (self.reads_at_import and self.random.random() < 0.2)
                else "3"
            )
            scope.flat = False
            parameters.append(f"{name}={default}")
        kind = self.random.random()
        if kind < 0.1:
            parameters.append("*args")
        elif kind < 0.25:
            parameters += ["*", "key=1"]
        if self.random.random() < 0.1:
            parameters.append("**kwargs")
        elif count and kind > 0.9 and not any("=" in argument for argument in arguments):
            parameters.insert(count, "/")
        if not parameters:
            return self.random.choice(("", "", " ", "\n")), ""
        style = self.random.random()
        if style < 0.6:
            text = ", ".join(parameters)
        elif style < 0.7:
            text = "\n    " + ",\n    ".join(parameters) + ",\n"
        elif style < 0.8:
            text = "\n    " + ",\n    ".join(parameters) + "\n"
        elif style < 0.9:
            text = "\n    " + ",  # é\n    ".join(parameters) + "  # the last\n    # of all\n"
        else:
            text = ",\n      ".join(parameters)
        return text, ", ".join(arguments)

    # -- statements and expressions ----------------------------------------------------------

    def _statement(self, scope: _Scope) -> str:
        while True:
            template = self.random.choice(_STATEMENTS)
            # What comes after a return is dead, and one in ten functions having it is enough.
            if template.startswith("return") and self.random.random() < 0.9:
                continue
            if "def " in template and scope.depth > 1:
                continue
            break
        names = dict(scope.names)
        self.fresh += 1
        scope.names |= {"N": f"v{self.fresh}", "M": f"u{self.fresh}"}
        text = self._filled(template, scope)
        scope.names = names
        return text

    def _filled(self, template: str, scope: _Scope) -> str:
        """The template with its holes filled."""
        if "«s»" in template:
            template = "\n".join(
                self._with_statements(line, scope) for line in template.split("\n")
            )
        outer, inner = self.random.choice((('"', "'"), ("'", '"')))

        def fill(match: re.Match[str]) -> str:
            hole, which = match.groups()
            if hole == "q":
                return outer
            if hole == "p":
                return inner
            if hole in scope.names:
                return scope.names[hole]
            return self._hole(hole, which, scope)

        return _HOLE.sub(fill, template)

    def _with_statements(self, line: str, scope: _Scope) -> str:
        if "«s»" not in line and "«as»" not in line:
            return line
        indent = len(line) - len(line.lstrip())
        if "«as»" in line:
            return " " * indent + self.random.choice(_IN_ASYNC).replace("\n", "\n" + " " * indent)
        scope.depth += 1
        said = ["out = []"]
        said += [self._statement(scope) for _ in range(self.random.choice((1, 1, 2, 3)))]
        scope.depth -= 1
        said = [each for each in said if not each.startswith("return")]
        return _indented("\n".join(said), indent // 4)

    def _hole(self, hole: str, which: str | None, scope: _Scope) -> str:
        if hole in "EBRC" and len(hole) == 1:
            self.read_at_import = True
            scope.at_import = True
            text = self._hole(hole.lower(), which, scope)
            scope.at_import = False
            return text
        match hole:
            case "i":
                return str(self.random.randrange(1, 4))
            case "flag":
                return self.random.choice(("bool(1)", "1 > 2", "not 0"))
            case "r":
                return self._read(_NUMBERS, which, scope)
            case "fr":
                before, scope.flat = scope.flat, True
                text = self._read(_NUMBERS, which, scope)
                scope.flat = before
                return text
            case "b":
                return self._read(_TESTS, which, scope)
            case "g":
                return self._read(_GROUPS, which, scope)
            case "v":
                name = self.random.choice(_NUMBERS)[0]
                return self._spelled(name, scope)
            case "init":
                name = self.random.choice(("is_initialized", "model_parallel_is_initialized"))
                return self._spelled(name, scope)
            case "m" | "mod":
                return self._root(scope)
            case "private":
                return self.random.choice(_PRIVATE)
            case "a" | "x":
                if self.random.random() < 0.75 or scope.depth > 2:
                    return self._read(_NUMBERS, None, scope)
                return f"({self._expression(scope)})"
            case "e":
                if self.random.random() < 0.35:
                    return self._read(_NUMBERS, None, scope)
                return self._expression(scope)
            case "f":
                return self._fstring(scope)
            case "cf":
                before, scope.flat = scope.flat, True
                text = self._call(scope)
                scope.flat = before
                return text
            case "c":
                return self._call(scope)
        raise ValueError(hole)

    def _expression(self, scope: _Scope) -> str:
        choices = [*_ANYWHERE]
        if not (scope.at_import or scope.no_walrus):
            choices += _WALRUS
        if not scope.flat:
            choices += _SEVERAL_LINES
        while True:
            template = self.random.choice(choices)
            if scope.flat and ("«q»" in template or "«f»" in template):
                continue
            break
        scope.depth += 1
        # A name can't be bound in what a comprehension runs over, nor in a class body's.
        before, scope.no_walrus = scope.no_walrus, scope.no_walrus or "for " in template
        text = (
            self._read(_NUMBERS, None, scope) if scope.depth > 3 else self._filled(template, scope)
        )
        scope.no_walrus = before
        scope.depth -= 1
        if scope.depth and not text.startswith(("[", "(")) and " \\\n" in text:
            text = f"({text})"
        return text

    def _fstring(self, scope: _Scope) -> str:
        if scope.flat:
            return "str(" + self._read(_NUMBERS, None, scope) + ")"
        choices = [*_FSTRINGS, *_LONG_FSTRINGS]
        if _NEW_FSTRINGS:
            choices += _NEWER_FSTRINGS
        template = self.random.choice(choices)
        while "w :=" in template and (scope.at_import or scope.no_walrus):
            template = self.random.choice(choices)
        outer, inner = self.random.choice((('"', "'"), ("'", '"')))
        scope.flat = True
        scope.depth += 2
        template = template.replace("«q»", outer).replace("«p»", inner).replace("«t»", outer * 3)
        text = self._filled(template, scope)
        scope.depth -= 2
        scope.flat = False
        return text

    def _read(
        self, among: tuple[tuple[str, tuple[str, ...]], ...], which: str | None, scope: _Scope
    ) -> str:
        if which is None:
            name, variants = self.random.choice(among)
        else:
            name, variants = which, ("",)
        arguments = self.random.choice(variants)
        if arguments and self.random.random() < 0.3:
            arguments = variants[0]
        arguments = arguments.replace("«flag»", self._hole("flag", None, scope))
        return self._spelled(name, scope) + self._parentheses(arguments, scope)

    def _parentheses(self, arguments: str, scope: _Scope) -> str:
        chance = self.random.random()
        if chance < 0.8:
            return f"({arguments})"
        if scope.flat or chance < 0.9:
            comma = "," if arguments else ""
            return self.random.choice(
                (f"( {arguments} )", f"({arguments}{comma})", f" ({arguments})")
            )
        comma = "," if arguments else ""
        return self.random.choice(
            (
                f"(\n        {arguments}\n    )",
                f"(  # why\n        {arguments}{comma}  # because\n    )",
                f"(  # nothing else\n{arguments})",
            )
        )

    def _root(self, scope: _Scope) -> str:
        if scope.lazy and not scope.at_import:
            return scope.lazy
        roots = [root for root in scope.module.roots if root not in ("NAMES", "")]
        if not roots:
            statement, root = self.random.choice(_IMPORTS[:4])
            scope.module.header.append(statement)
            scope.module.roots.append(root)
            return root
        return self.random.choice(roots)

    def _spelled(self, name: str, scope: _Scope) -> str:
        if scope.lazy and not scope.at_import:
            root = scope.lazy
        elif not scope.module.roots:
            root = self._root(scope)
        else:
            root = self.random.choice(scope.module.roots)
        if root == "NAMES":
            if name in scope.module.borrowed:
                return scope.module.borrowed[name]
            for lender in scope.module.lenders:
                if name in lender.singles and name not in scope.module.singles:
                    here, where = f"lent_{name}", scope.module.relative(lender)
                    scope.module.header.append(
                        f"from {where} import {lender.singles[name]} as {here}"
                    )
                    return scope.module.borrowed.setdefault(name, here)
            alias = self.random.choice((name, name, name.removeprefix("get_")))
            return scope.module.singles.setdefault(name, alias)
        if root == "":
            return name
        if not scope.flat and self.random.random() < 0.03:
            return (
                f"({root})\\\n        .{name}" if self.random.random() < 0.5 else f"{root} . {name}"
            )
        return f"{root}.{name}"

    def _call(self, scope: _Scope) -> str:
        fitting = [
            use
            for use in self.uses
            if scope.cost + use.cost <= _MOST
            and (use.guarded or not scope.guarded)
            and (use.home is scope.module or not use.here_only)
            and not (scope.flat and "«q»" in use.text)
        ]
        if not fitting:
            return f"({self._hole('i', None, scope)})"
        use = self.random.choice(fitting)
        scope.cost += use.cost
        ref = use.name if use.home is scope.module else self._imported(use, scope)
        number = lambda match: (  # noqa: E731
            self._read(_NUMBERS, None, scope) + " % 3"
            if self.random.random() < 0.15 and not scope.guarded
            else str(self.random.randrange(1, 4))
        )
        text = use.text.replace("«N»", ref).replace("«S»", use.name)
        text = re.sub("«i»", number, text).replace("«q»", '"')
        return f"({text})"

    def _imported(self, use: _Use, scope: _Scope) -> str:
        module = scope.module
        key = f"{use.home.name}.{use.name}"
        if key not in module.imported:
            home = use.home
            style = self.random.random()
            if style < 0.5:
                where = self.random.choice((module.relative(home), home.name))
                module.header.append(f"from {where} import {use.name}")
                module.imported[key] = use.name
            elif style < 0.6:
                module.header.append(
                    f"from {module.relative(home)} import (\n    {use.name} as his_{use.name},\n)"
                )
                module.imported[key] = f"his_{use.name}"
            elif style < 0.8:
                module.header.append(f"import {home.name} as mod_{home.parts[-1]}")
                module.imported[key] = f"mod_{home.parts[-1]}.{use.name}"
            else:
                module.header.append(f"import {home.name}")
                module.imported[key] = key
        return module.imported[key]


def _indented(text: str, levels: int) -> str:
    """Every line further right; inside of brackets and strings that does no harm."""
    return "\n".join("    " * levels + line if line else line for line in text.split("\n"))
