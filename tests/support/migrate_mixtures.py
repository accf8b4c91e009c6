"""Random modules in which each function has several things at hand that could be asked about
groups, and some of what it asks only the globals can answer; the same for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_HEAD = "from megatron.core import mpu, tensor_parallel\n\n\n"
_KINDS = {
    "tp": ("tensor_model_parallel_rank()", "tensor_model_parallel_group()"),
    "pp": ("pipeline_model_parallel_world_size()", "pipeline_model_parallel_group()"),
    "dp": (
        "data_parallel_rank()",
        "data_parallel_group()",
        "data_parallel_group(with_context_parallel=True)",
        "data_parallel_group_gloo(with_context_parallel=True)",
    ),
    "cp": ("context_parallel_world_size()", "context_parallel_group(check_initialized=False)"),
    "ep": ("expert_model_parallel_rank()", "expert_data_parallel_group()"),
    "mp": ("model_parallel_group()", "tensor_and_context_parallel_group()"),
}
_FIELDS = ("tp", "pp", "dp", "cp", "dp_cp", "ep", "expt_dp", "mp")
_PARAMETERS = ("model", "models", "pg_collection=None", "module", "teacher_model", "flag=()")
# What is at hand beside the parameters; in <> a read of the globals, or a field.
_BINDING = (
    "pg_collection = make(<field>)",
    "model = make(<read>)",
    "unwrapped_model = make(model)[0]",
    "pg_collection = model.pg_collection",
)
_STATEMENTS = (
    "out.append(<read>)",
    "out.append((<read>, <read>))",
    "if <read>:\n    out.append(<read>)",
    "for each in models:\n    out.append((each, <read>))",
    "out.append(pg_collection.<field>)",
    "out.append(self.pg_collection.<field>.size())",
    "if pg_collection is None:\n    out.append(<read>)",
    "if pg_collection is None:\n    pg_collection = make()\n    pg_collection.<field> = <read>",
    "if pg_collection is not None:\n    return <read>",
    "mpu.set_tensor_model_parallel_rank(1)",
    "out.append(mpu.get_<kind>(*flag))",
    "out.append(tensor_parallel.gather_from_sequence_parallel_region(out))",
    "out.append(helper(<read>))",
    "out.append(other(model))",
    "def inner():\n    return <read>\n\nout.append(inner)",
    "out.append([<read> for model in models])",
)
_KEEPING = (
    "self.model = make()",
    "self.pg_collection = pg_collection",
    "pass",
    "self.model = None",
)


def make_mixture(seed: int) -> dict[str, str]:
    """File -> text, of two files."""
    drawn = random.Random(seed)
    first = [_function("helper", drawn), _function("other", drawn), _class("Base", "", drawn)]
    last = [_class("Derived", "(Base)", drawn), _function("alone", drawn)]
    imports = "from first import Base, helper, make, other\n"
    make = "def make(*given):\n    return given\n"
    return {
        "first.py": _HEAD + "\n\n".join([make, *first]),
        "last.py": imports + _HEAD + "\n\n".join(last),
    }


def _class(name: str, bases: str, drawn: random.Random) -> str:
    given = drawn.choice(("", ", pg_collection=None", ", model", ", **settings"))
    methods = [f"def __init__(self{given}):\n{_indented(_constructor(given, drawn))}"]
    methods += [
        _function(f"{name.lower()}_{at}", drawn, "self") for at in range(drawn.randint(1, 3))
    ]
    if drawn.random() < 0.3:
        methods.append("@staticmethod\n" + _function("apart", drawn))
    return f"class {name}{bases}:\n{_indented(chr(10).join(methods))}"


def _constructor(given: str, drawn: random.Random) -> str:
    keeping = [each for each in _KEEPING if "pg" not in each or "pg" in given]
    lines = [drawn.choice(keeping)]
    if drawn.random() < 0.5:
        lines.append(f"self.early = {_filled('<read>', drawn)}")
    drawn.shuffle(lines)
    return "\n".join(lines)


def _function(name: str, drawn: random.Random, *first: str) -> str:
    given = drawn.sample(_PARAMETERS, drawn.randint(0, 3))
    given.sort(key=lambda each: "=" in each)
    body = ["out = []"]
    body += drawn.sample(_BINDING, drawn.choice((0, 0, 1, 2)))
    body += drawn.sample(_STATEMENTS, drawn.randint(1, 4))
    lines = "\n".join(_filled(each, drawn) for each in (*body, "return out"))
    return f"def {name}({', '.join((*first, *given))}):\n{_indented(lines)}"


def _filled(template: str, drawn: random.Random) -> str:
    kinds = drawn.sample(sorted(_KINDS), 2)  # few, so that they meet
    while "<" in template:
        getter = drawn.choice(_KINDS[drawn.choice(kinds)])
        template = template.replace("<read>", f"mpu.get_{getter}", 1)
        template = template.replace("<kind>", getter.partition("(")[0], 1)
        template = template.replace("<field>", drawn.choice(_FIELDS), 1)
    return template


def _indented(text: str) -> str:
    return "\n".join(_of_lines(text)) + "\n"


def _of_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield f"    {line}" if line else ""
