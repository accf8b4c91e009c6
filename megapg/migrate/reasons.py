"""The reasons why a use stays or needs a look, and what to do by hand.

``megapg check`` prints a code with each use, and ``megapg explain CODE`` prints the text.
:mod:`megapg.migrate.decide` chooses the reason of a use.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from megapg.errors import UnsupportedOptionError


@dataclass(frozen=True)
class Reason:
    """One reason."""

    code: str  # as in reports
    title: str  # one line, continues "the use ..."
    why: str
    instead: str  # what to do by hand


_ALL = (
    Reason(
        "lifecycle",
        "makes or destroys the groups",
        "initialize_model_parallel(), destroy_model_parallel() and the functions that they call "
        "own the groups. A collection only holds groups.",
        "Open a session where the program starts: with megapg.session(tp=..., pp=...) as session. "
        "Pass session.groups on. The session closes its groups at the end.",
    ),
    Reason(
        "setter",
        "fakes a rank or a size, or reads the fake",
        "The set_* functions and the _MPU_* variables override the ranks and sizes of the groups, "
        "mostly in checkpoint converters that run without groups. A collection can't be changed.",
        "Give the converter a collection of fake groups (megapg.testing), or compute the ranks "
        "with megapg.layout.ParallelLayout. Migrate the functions that it calls together with it.",
    ),
    Reason(
        "vp-stage",
        "reads or sets the current model chunk",
        "With a virtual pipeline a rank has several model chunks. The current chunk belongs to the "
        "schedule, not to the groups. From 0.13 on Megatron-core passes it as vp_stage.",
        "Take vp_stage as a parameter (models and layers have self.vp_stage) and pass it: "
        "getters.is_pipeline_last_stage(pg, ignore_virtual=False, vp_stage=vp_stage).",
    ),
    Reason(
        "no-field",
        "asks for something that a collection does not hold",
        "No field holds this group, or the function needs no group: it configures communicators, "
        "owns a global buffer, or sets the split between encoder and decoder, which 0.14 removed.",
        "Create an extra group with torch.distributed.new_group() where the session is opened, "
        "and pass it next to the collection. For a buffer, use getters.memory_buffer(pg) or your "
        "own. For ranks without groups, use megapg.layout.ParallelLayout. To keep the use, add "
        "'# megapg: keep'.",
    ),
    Reason(
        "version",
        "is missing or differs in a Megatron-core that may run the code",
        "The name does not exist in these versions of Megatron-core, or the call has another "
        "meaning in some of them. A name that no version has comes from a fork, or is misspelled. "
        "A fork with groups of its own may mean tensor parallelism by get_model_parallel_group().",
        "State your version: --from-core 0.16, from-core in [tool.megapg], or a tighter pin of "
        "megatron-core. Keyword arguments often help. Delete code for versions that you no longer "
        "run. Put a fork's own groups into ProcessGroupCollection.from_groups(...).",
    ),
    Reason(
        "arguments",
        "has arguments that can't be translated",
        "The call passes *args or **kwargs, an argument that this version rejects, or a flag that "
        "is known at run time only. Or it accepts missing groups (check_initialized=False), has a "
        "comment inside, or is itself inside the arguments of another use.",
        "Write the arguments out. Replace a run-time flag by an if with one call in each branch. "
        "For check_initialized=False, test pg_collection is not None. Move the comment above the "
        "statement, or the inner use into a variable, and run the tool again.",
    ),
    Reason(
        "may-be-none",
        "may be None",
        "The value is None before the groups exist, or on ranks outside the group. torch takes "
        "group=None for all ranks. The replacement can differ there, so only --unsafe writes it.",
        "Test first: if pg.embd is not None. Or drop check_initialized=False, so that a missing "
        "group raises. In place of a private variable, test pg_collection is not None.",
    ),
    Reason(
        "inside-core",
        "calls a function of Megatron-core that reads the globals",
        "The function returns a group, a rank or a collection. Without a group among its arguments "
        "it takes the one of the globals, whatever the caller was given.",
        "Pass the group, or use the collection, as the report says for each function.",
    ),
    Reason(
        "fallback",
        "is the branch for code without a collection",
        "The code tests whether a collection was passed, and this branch handles None. The globals "
        "are intended here.",
        "Nothing. Delete the branch once every caller passes a collection.",
    ),
    Reason(
        "assigned",
        "uses a name that is replaced or has several meanings",
        "The code assigns to an attribute of parallel_state, or binds the name to other things as "
        "well. A collection would not see the replaced getter.",
        "Pass a collection that gives the wanted answers; megapg.testing makes fake groups. "
        "Give each meaning its own name.",
    ),
    Reason(
        "as-value",
        "passes the getter or the module on",
        "The code passes, stores or returns the getter or the module, or looks a name up at run "
        "time with getattr(). Its calls and their arguments are not known here.",
        "Pass a function that reads a collection: lambda: pg.rank('tp'). Replace getattr() by the "
        "name, and hasattr() by hasattr(pg, 'ep'). If the receiver needs the module, as in "
        "deepspeed.zero.Init(mpu=mpu), add '# megapg: keep' and call it under "
        "megapg.megatron.published(pg).",
    ),
    Reason(
        "in-a-string",
        "is inside a string",
        "The string names the getter, as in patch('...'), or it is an f-string that has no place "
        "for the quotes of the replacement, or prints its own text, as f'{x=}' does.",
        "Move the call out of the f-string, into a variable before it. Let a patch name "
        "megatron.core.parallel_state: code without a collection still calls the getters there.",
    ),
    Reason(
        "test",
        "is in a test",
        "Tests are not rewritten. While the package moves, code that is passed no collection still "
        "calls the getters, so the tests pass.",
        "Nothing at first. Once a function needs a collection, pass one of fake groups "
        "(megapg.testing) in its test, or open a session.",
    ),
    Reason(
        "unverified",
        "is in a file whose new text does not compile",
        "The new text of the file was not valid Python. The file stays as it is.",
        "Rewrite the file by hand, and report it: the report names the error.",
    ),
    Reason(
        "unwritten",
        "is in a run that could not write its files",
        "A file is read-only or was changed meanwhile, or the disk is full. No file was changed.",
        "Remove the cause, which the report names, and run the tool again.",
    ),
)

REASONS: Mapping[str, Reason] = {reason.code: reason for reason in _ALL}


def explain(code: str) -> Reason:
    """Return the reason with a code.

    Raises:
        UnsupportedOptionError: for an unknown code.
    """
    if code in REASONS:
        return REASONS[code]
    close = difflib.get_close_matches(code, REASONS, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UnsupportedOptionError(f"no reason {code!r}.{hint} The codes are {', '.join(REASONS)}.")
