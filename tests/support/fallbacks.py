"""Find the functions of a Megatron-core that answer with the globals, outside of parallel_state.

Such a function returns what a getter of the globals returned: a group, a rank, a truth value, or a
collection or a dictionary with groups in it. It is a function of a module or of a class, without an
object. Functions that compute with a group, such as collectives, are not found.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

_GLOBALS = ("parallel_state", "mpu")
_ASKS_IF_THERE_ARE_ANY = {"is_initialized", "is_unitialized", "model_parallel_is_initialized"}


def fallbacks(core: Path) -> set[str]:
    """Return the dotted names of these functions, below ``megatron.core``."""
    return {name for file in sorted(core.rglob("*.py")) for name in _of_file(core, file)}


def parameters_of(core: Path, name: str) -> list[str]:
    """Return the parameters of such a function, without the class of a class method."""
    for file in core.rglob("*.py"):
        module = ".".join(file.relative_to(core).with_suffix("").parts)
        if name.startswith(f"{module}."):
            for each, function in _functions(ast.parse(file.read_text(encoding="utf-8"))):
                if f"{module}.{each}" == name:
                    return [arg.arg for arg in function.args.args if arg.arg != "cls"]
    raise AssertionError(f"{core} has no {name}")


def _of_file(core: Path, file: Path) -> Iterator[str]:
    module = ".".join(file.relative_to(core).with_suffix("").parts)
    text = file.read_text(encoding="utf-8")
    if module == "parallel_state" or not any(each in text for each in _GLOBALS):
        return
    tree = ast.parse(text)
    imported = {
        each.asname or each.name: each.name if (node.module or "").endswith(_GLOBALS) else ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name in _GLOBALS or (node.module or "").endswith(_GLOBALS)
    }
    for name, function in _functions(tree):
        if _answers(function, imported):
            yield f"{module}.{name}"


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the public functions that are called without an object."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node, prefix)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            bare = {_dotted(each) for each in node.decorator_list} & {"staticmethod", "classmethod"}
            if bare or not prefix:
                yield prefix + node.name, node


def _answers(function: ast.FunctionDef, imported: dict[str, str]) -> bool:
    """True if the function returns what it reads from the globals."""
    kept: set[str] = set()
    for _ in range(2):  # a variable may be given to another one further up in a loop
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _reads(node.value, imported, kept):
                kept |= {_dotted(_root(target)) for target in node.targets}
    returned = (each.value for each in ast.walk(function) if isinstance(each, ast.Return))
    return any(_reads(each, imported, kept) for each in returned)


def _root(target: ast.expr) -> ast.expr:
    """Return the variable that an assignment changes."""
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target


def _reads(value: ast.expr | None, imported: dict[str, str], kept: set[str]) -> bool:
    """True if a value is an answer of the globals, or holds one."""
    match value:
        case ast.Name():
            return value.id in kept
        case ast.Call():
            name = _dotted(value.func)
            inside = [each.value for each in value.keywords if each.arg is None]
            inside += value.args[:1] if name.endswith("partial") else []
            inside += [value.func.value] if isinstance(value.func, ast.Subscript) else []
            return _is_getter(name, imported) or any(_reads(e, imported, kept) for e in inside)
        case ast.Attribute() if _is_getter(_dotted(value), imported):
            return True
        case ast.Dict():
            return any(_reads(each, imported, kept) for each in value.values)
        case ast.BoolOp():
            return any(_reads(each, imported, kept) for each in value.values)
        case ast.IfExp():
            return any(_reads(each, imported, kept) for each in (value.body, value.orelse))
        case ast.Compare():
            return _reads(value.left, imported, kept)
        case ast.UnaryOp():
            return _reads(value.operand, imported, kept)
        case ast.DictComp():
            return _reads(value.value, imported, kept)
    return False


def _is_getter(name: str, imported: dict[str, str]) -> bool:
    root, _, rest = name.partition(".")
    if root not in imported:
        return False
    member = rest or imported[root]
    return member.startswith(("get_", "is_")) and member not in _ASKS_IF_THERE_ARE_ANY


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
