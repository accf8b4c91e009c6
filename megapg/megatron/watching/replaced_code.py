"""Gives functions of ``parallel_state`` other code: the way to see calls by every name.

Code that did ``from megatron.core.parallel_state import get_x`` holds the function itself, so a new
value of the module's name would not reach it. The code of the function does. The new code
is compiled with the same parameters: with ``*args``, ``inspect.signature`` and the getters of
:mod:`megapg.megatron.getters` could not tell which arguments this core takes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType

from megapg.megatron.core import parameters_of


def unwrapped(value: object, module: ModuleType) -> FunctionType | None:
    """Return the function of ``module`` behind a value; None if its code can't be replaced."""
    if not callable(value):
        return None
    try:
        function = inspect.unwrap(value)
    except ValueError:  # a stub that answers to every name
        return None
    if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
        return None
    code = function.__code__
    # A function with free variables may be a wrapper that hides the function in it.
    hidden = code.co_freevars or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    special = code.co_posonlyargcount or code.co_kwonlyargcount
    return None if hidden or special or not function.__name__.isidentifier() else function


def twin(function: FunctionType) -> FunctionType:
    """Return the function under its code of now, unaffected by later changes of the original."""
    return FunctionType(function.__code__, function.__globals__, function.__name__)


def calling_instead(function: FunctionType, run: Callable[[dict[str, object]], object]) -> CodeType:
    """Return code with the function's own parameters that calls ``run(arguments)``.

    ``run`` is one of its constants, and not a name of the module. So another thread that is inside
    of the function finds it after the code was put back.
    """
    own = function.__code__
    code = _template(function.__name__, parameters_of(own))
    constants = tuple(run if value == "here" else value for value in code.co_consts)
    return code.replace(co_consts=constants, co_qualname=own.co_qualname)


@functools.cache  # compiling takes a tenth of a millisecond
def _template(name: str, parameters: tuple[str, ...]) -> CodeType:
    arguments = ", ".join(f"{each!r}: {each}" for each in parameters)
    source = f"def {name}({', '.join(parameters)}):\n    _run = 'here'\n"
    source += f"    return _run({{{arguments}}})\n"
    scope: dict[str, FunctionType] = {}
    exec(compile(source, "<megapg>", "exec"), scope)  # names come from parallel_state
    return scope[name].__code__
