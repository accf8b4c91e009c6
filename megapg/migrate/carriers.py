"""Choose where a function takes its groups from: one carrier for each function.

The first that a function has, in this order:

1. a parameter that is a collection;
2. ``self``, if the class keeps a collection;
3. a parameter that is a model;
4. ``self``, if the class keeps a model or is a torch module;
5. the same four of the functions around, from the inside out;
6. a new parameter ``pg_collection``, of the function or of the constructor of its class;
7. ``self`` of another class, to which a caller may give an attribute ``pg_collection``;
8. ``megapg.resolve(None)``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from megapg.layout import FIELDS
from megapg.migrate.facts import HERE, Class, Everything, Function, Where
from megapg.migrate.migration import How
from megapg.migrate.project import Meaning, Project
from megapg.migrate.replaced import Replaced
from megapg.upstream.mapping import COLLECTION_NAMES, MODEL_ATTRIBUTES

PARAMETER = "pg_collection"

_COLLECTION_TYPE = re.compile(r"ProcessGroupCollection|(Model|Grad)CommProcessGroups")
_MODEL = re.compile(r"((un)?wrapped_)?(models?|modules?)(_chunks?|_list)?")
_MODEL_TYPE = re.compile(
    r"(?<!\w)(MegatronModule|GraphableMegatronModule|GPTModel|BertModel|T5Model|MambaModel"
    r"|LanguageModule|Float16Module|DistributedDataParallel|DDP|TransformerLayer|LLaVAModel)\b"
)
_NO_MODEL_TYPE = re.compile(r"\b(str|int|dict|Dict|Path|ModuleType)\b")
# Decorators that pass all arguments on and do not look at the signature.
_PLAIN_DECORATORS = re.compile(
    r"torch\.(no_grad|inference_mode|enable_grad|compile|cuda\.nvtx\.range|amp\.autocast)"
    r"|(torch\.\w+\.)?nvtx\.\w+|contextlib\.(async)?contextmanager"
    r"|(builtins\.)?(staticmethod|classmethod)|typing\.no_type_check|typing_extensions\.deprecated"
)
# Modules of torch, Megatron-core and Transformer Engine: groups_of() looks into their submodules.
_MODULES = re.compile(
    r"(torch\.)?nn\.(\w+\.)*\w+|(pytorch_)?lightning\.\S*LightningModule"
    r"|transformer_engine\.pytorch\.\S+|megatron\.(\w+\.)*\w*(Module|Model|Layer|Block|Attention"
    r"|Embedding|MLP|Linear|Mixer|Stack|Router|DistributedDataParallel)"
)
# Classes outside of the project that pass all arguments on to the constructor.
_PLAIN_BASES = re.compile(
    r"(builtins\.)?object|abc\.ABC|typing\.Generic|torch\.nn\.(\w+\.)*\w+|megatron\.\S+"
    r"|torch\.utils\.data\.\S+|torch\.optim\.\S+"
)
_SEQUENCES = re.compile(r"(builtins\.)?(list|tuple)|(typing\.)?NamedTuple")
# Classes with these create objects differently, or look at all attributes.
_CUSTOM_ATTRIBUTES = {"__new__", "__slots__", "__setattr__", "__dict__"}


@dataclass(frozen=True)
class Node:
    """A function, or a class for its constructor, that can take the new parameter."""

    path: Path
    name: str  # qualified


@dataclass(frozen=True)
class Carrier:
    """Where a function takes its groups from."""

    how: How  # THREADED stands for the new parameter until all calls are known
    # ``collection``, ``self`` and ``model``: an expression that has groups;
    # ``parameter``: the new one; ``none``: ``resolve(None)``.
    kind: str
    expression: str = ""
    node: Node | None = None  # takes the new parameter


NONE = Carrier(How.RESOLVED, "none")


class Carriers:
    """Chooses the carriers of one project.

    Args:
        project: the files.
        everything: the facts of all files that were scanned so far.
        replaced: what some file replaces at run time.
    """

    def __init__(
        self, project: Project, everything: Everything, replaced: Collection[Replaced] = ()
    ) -> None:
        self._project, self._everything, self._replaced = project, everything, replaced

    # -- looking things up -------------------------------------------------------------------------

    def meaning(self, dotted: str, path: Path) -> Meaning:
        """Return what a dotted name of the facts stands for."""
        if dotted.startswith(HERE + "."):
            return Meaning(dotted, path, dotted[len(HERE) + 1 :])
        return self._project.meaning(dotted, path)

    def function(self, path: Path, name: str) -> Function | None:
        """Return the facts of a function."""
        facts = self._everything.get(path)
        return facts.functions.get(name) if facts else None

    def class_at(self, path: Path | None, name: str) -> Class | None:
        """Return the facts of a class."""
        facts = self._everything.get(path) if path is not None else None
        return facts.classes.get(name) if facts else None

    def bases(self, of: Class) -> Iterator[Class | str]:
        """Yield the bases of a class: facts of those in the project, else dotted names."""
        for base in of.bases:
            meaning = self.meaning(base, of.path)
            found = self.class_at(meaning.path, meaning.local)
            yield meaning.name if found is None or found is of else found

    def ancestry(self, of: Class, depth: int = 0) -> Iterator[Class]:
        """Yield a class and its bases in the project."""
        yield of
        for base in self.bases(of) if depth < 20 else ():
            if isinstance(base, Class):
                yield from self.ancestry(base, depth + 1)

    # -- carriers ----------------------------------------------------------------------------------

    def around(self, path: Path, name: str) -> list[Function]:
        """Return a function and the functions around it, from the inside out."""
        found = []
        function = self.function(path, name)
        while function is not None:
            found.append(function)
            function = self.function(path, function.outer)
        return found

    def of(self, path: Path, name: str, where: Where) -> Carrier:
        """Return the carrier of a use or a call.

        Args:
            path: of the file.
            name: of the function around it; empty at module level.
            where: it lies there.
        """
        around = self.around(path, name)
        if not around or where.in_class or self.is_repeated(around):
            return NONE
        hidden: frozenset[str] = where.none
        for function in around:
            for carrier in self._existing(function):
                if carrier.kind == "self" and self._looks_up(function):
                    continue
                if carrier.expression not in hidden | function.deleted:
                    return carrier
            if function is not around[-1]:
                hidden |= function.bound  # what an inner function binds is another variable
        if around[-1].of_class and self._looks_up(around[-1]):
            return NONE
        carrier = NONE if around[0].fakes_ranks else self._new(around[-1])
        return NONE if carrier.expression in hidden | around[-1].deleted else carrier

    def is_repeated(self, around: Iterable[Function]) -> bool:
        """True if there are several functions of the name of one of these."""
        return any(each.name in self._everything[each.path].repeated for each in around)

    def _existing(self, function: Function) -> Iterator[Carrier]:
        for each in function.parameters:
            if each.name in COLLECTION_NAMES or _COLLECTION_TYPE.search(each.annotation):
                yield Carrier(How.COLLECTION, "collection", each.name)
        kept = self._kept(function)
        if kept & set(COLLECTION_NAMES):
            yield Carrier(How.COLLECTION, "self", function.self_name)
        for each in function.parameters:
            if _is_model(each.name, each.annotation):
                yield Carrier(How.MODEL, "model", each.name)
        if kept:
            yield Carrier(How.MODEL, "self", function.self_name)
        elif self._is_module(function):
            of = self.class_at(function.path, function.of_class)
            node = self.constructor(of) if of is not None else None
            yield Carrier(How.MODEL, "self", function.self_name, node)

    def _looks_up(self, method: Function) -> bool:
        """True if looking for groups in an object calls methods of its class."""
        of = self.class_at(method.path, method.of_class)
        for each in self.ancestry(of) if of is not None else ():
            if {"__getattr__", "__getattribute__"} & each.methods:
                return True
            if any(isinstance(b, str) and _SEQUENCES.fullmatch(b) for b in self.bases(each)):
                return True
        return False

    def _is_module(self, method: Function) -> bool:
        """True if a method's object is a torch module that is built already."""
        of = self.class_at(method.path, method.of_class)
        if of is None or not method.self_name or method.last_name == "__init__":
            return False
        bases = (base for each in self.ancestry(of) for base in self.bases(each))
        return any(isinstance(base, str) and _MODULES.fullmatch(base) for base in bases)

    def _kept(self, method: Function) -> set[str]:
        """Return the attributes with a collection or a model that objects of the class have."""
        of = self.class_at(method.path, method.of_class)
        if of is None or not method.self_name or method.last_name == "__init__":
            return set()
        kept = {each for base in self.ancestry(of) for each in base.attributes}
        return kept & {*COLLECTION_NAMES, *MODEL_ATTRIBUTES}

    def _new(self, outermost: Function) -> Carrier:
        """Return the carrier of a function that has none: a new parameter, if one is possible."""
        if not outermost.self_name:
            node = Node(outermost.path, outermost.name)
            takes = self.can_take(node)
            return Carrier(How.THREADED, "parameter", PARAMETER, node) if takes else NONE
        of = self.class_at(outermost.path, outermost.of_class)
        keeper = self.constructor(of) if of is not None else None
        if keeper is None and outermost.last_name != "__init__":
            return Carrier(How.RESOLVED, "self", outermost.self_name)
        if keeper is None:
            return NONE
        if outermost.last_name == "__init__":
            own = keeper == Node(outermost.path, outermost.of_class)
            return Carrier(How.THREADED, "parameter", PARAMETER, keeper) if own else NONE
        return Carrier(How.THREADED, "self", outermost.self_name, keeper)

    # -- the new parameter -------------------------------------------------------------------------

    def constructor(self, of: Class) -> Node | None:
        """Return the class, this one or a base, whose constructor runs and takes the parameter."""
        if "__init__" in of.attributes:
            return None
        if "__init__" in of.methods:
            node = Node(of.path, of.name)
            return node if self.can_take(node) else None
        bases = list(self.bases(of))
        if len(bases) != 1 or isinstance(bases[0], str) or not self._is_plain(of):
            return None
        return self.constructor(bases[0])

    def base_constructor(self, of: Class) -> Node | None:
        """Return the class whose constructor ``super().__init__()`` runs, if that is certain."""
        if of in self._mixed:
            return None
        bases = [base for base in self.bases(of) if isinstance(base, Class)]
        return self.constructor(bases[0]) if bases else None

    @cached_property
    def _mixed(self) -> list[Class]:
        """Return the bases of classes with several: these decide what ``super()`` is."""
        classes = [each for facts in self._everything.values() for each in facts.classes.values()]
        several = [each for each in classes if len(each.bases) > 1]
        return [each for of in several for each in self.ancestry(of)]

    def _is_plain(self, of: Class) -> bool:
        """True if a call of a class passes all arguments to a constructor that can keep one."""
        for each in self.ancestry(of):
            repeated = self._everything[each.path].repeated
            own = (each.methods | each.attributes) & _CUSTOM_ATTRIBUTES
            if each.decorators or each.has_keywords or own or PARAMETER in each.methods:
                return False
            if "__init__" in each.attributes:
                return False
            if each.name.partition(".")[0] in repeated:
                return False
            for base in self.bases(each):
                if isinstance(base, str) and not _PLAIN_BASES.fullmatch(base):
                    return False
        return True

    @cache  # noqa: B019 (as long-lived as the command)
    def can_take(self, node: Node) -> bool:
        """True if a function or constructor can have one more parameter."""
        of = self.class_at(node.path, node.name)
        if of is not None:
            init = self.function(node.path, f"{node.name}.__init__")
            takes = init is not None and self._can_take(init)
            return takes and self._is_plain(of) and node not in self._values
        function = self.function(node.path, node.name)
        if function is None or function.outer:
            return False
        if function.of_class:
            owner = self.class_at(node.path, function.of_class)
            if owner is None or not function.is_static or any(owner.bases):
                return False
        return self._can_take(function) and node not in self._values

    def _can_take(self, function: Function) -> bool:
        facts = self._everything[function.path]
        return not (
            function.any_keyword
            or function.name in facts.repeated
            or PARAMETER in function.names | function.bound
            or function.looks_at_itself
            or not all(map(_PLAIN_DECORATORS.fullmatch, function.decorators))
        )

    @cached_property
    def _values(self) -> set[Node]:
        """Functions and classes whose name is used without a call, or replaced at run time."""
        used = {(path, each) for path, facts in self._everything.items() for each in facts.values}
        found = set()
        for path, dotted in used:
            meaning = self.meaning(dotted, path)
            if meaning.path is not None and self.class_at(meaning.path, meaning.local) is None:
                found.add(Node(meaning.path, meaning.local))
        for each in self._replaced:
            dotted = ".".join([self._project.module(each.module), each.parts[0]])
            meaning = self._project.meaning(dotted, each.module)
            found |= {Node(each.module, each.parts[0])}
            if meaning.path is not None:
                found.add(Node(meaning.path, meaning.local.partition(".")[0]))
        return found


def _is_model(name: str, annotation: str) -> bool:
    if _NO_MODEL_TYPE.search(annotation):
        return False
    return _MODEL.fullmatch(name) is not None or _MODEL_TYPE.search(annotation) is not None


def in_order(fields: Iterable[str]) -> tuple[str, ...]:
    """Return field names once each, in the order of the collection."""
    return tuple(sorted(set(fields), key=FIELDS.index))
