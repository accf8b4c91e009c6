"""From what the groups can be had where a global is read now: what is in scope, the best first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from megapg.migrate.mapping import COLLECTION_NAMES, GROUP_PARAMETERS, Refusal, Replacement
from megapg.migrate.resolve import Resolver
from megapg.migrate.scopes import Binding, Instance, Opaque, Scope
from megapg.migrate.sites import Carrier

# What a model is called where it is passed, held in a variable, or kept by self.
MODEL_NAMES = ("model", "module", "unwrapped_model", "gpt_model", "model_chunk", "actor_module")

_MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module", "nn.Module")
_MODULES_OF_CORE = "megatron.core."
_RANKS = {"group": 0, "collection": 1, "model": 2}


def carriers(
    scope: Scope, line: int, path: Path, answer: Replacement | Refusal, resolver: Resolver
) -> tuple[Carrier, ...]:
    """What is in scope in a line: groups of the field that it asks for, collections, models."""
    wanted = _wanted(answer)
    found: dict[str, Carrier] = {}
    for carrier in _in_scope(scope, line, path, wanted, resolver):
        found.setdefault(carrier.expression, carrier)
    return tuple(sorted(found.values(), key=lambda carrier: _RANKS[carrier.kind]))


def _wanted(answer: Replacement | Refusal) -> dict[str, str]:
    """Names of variables -> the kind of carrier that one of that name is."""
    field = ""
    if isinstance(answer, Replacement) and answer.write_narrow("group") is not None:
        field = answer.field
    return {
        **dict.fromkeys(MODEL_NAMES, "model"),
        **{name: "group" for name, fields in GROUP_PARAMETERS.items() if field in fields},
        **dict.fromkeys(COLLECTION_NAMES, "collection"),
    }


def _in_scope(
    scope: Scope, line: int, path: Path, wanted: dict[str, str], resolver: Resolver
) -> Iterator[Carrier]:
    for each in scope.chain():
        if each.kind != "function":
            continue
        for name, bindings in each.bindings.items():
            first = bindings[0]
            if isinstance(first, Instance):
                yield from _of_self(name, first.of, path, wanted, resolver)
            elif name in wanted and (each is not scope or _bound_before(bindings, line)):
                yield _variable(name, wanted[name], bindings)


def _variable(name: str, kind: str, bindings: list[Binding]) -> Carrier:
    parameter = next((b for b in bindings if isinstance(b, Opaque) and b.parameter), None)
    if parameter is None:
        return Carrier(kind, name, "local")
    default = parameter.default
    may_be_none = isinstance(default, ast.Constant) and default.value is None
    return Carrier(kind, name, "parameter", may_be_none)


def _bound_before(bindings: list[Binding], line: int) -> bool:
    return any(b.line < line or (isinstance(b, Opaque) and b.parameter) for b in bindings)


def _of_self(
    name: str, of: Scope, path: Path, wanted: dict[str, str], resolver: Resolver
) -> Iterator[Carrier]:
    attributes: set[str] = set()
    is_module = False
    for each in _ancestry(of, path, resolver, set()):
        if isinstance(each, Scope):
            attributes |= {*each.attributes, *each.bindings}
        else:
            is_module = is_module or _is_module(each)
    for attribute in sorted(attributes & set(wanted)):
        yield Carrier(wanted[attribute], f"{name}.{attribute}", "attribute")
    if is_module:
        yield Carrier("model", name, "attribute")


def _ancestry(of: Scope, path: Path, resolver: Resolver, seen: set[int]) -> Iterator[Scope | str]:
    """A class and the classes that it is made of: scopes in the project, names outside of it."""
    if id(of) in seen or not isinstance(of.node, ast.ClassDef) or of.parent is None:
        return
    seen.add(id(of))
    yield of
    for base in of.node.bases:
        for thing in resolver.expression(base, of.parent, path):
            if thing.kind == "class" and thing.scope is not None and thing.path is not None:
                yield from _ancestry(thing.scope, thing.path, resolver, seen)
            elif thing.kind == "name":
                yield thing.name


def _is_module(base: str) -> bool:
    of_core = base.startswith(_MODULES_OF_CORE) and base.endswith(("Module", "Model", "Layer"))
    return base in _MODULES or of_core
