"""Why a use of the globals has no replacement, and what to do about it: one code for each reason.

The codes are what ``megapg check`` prints beside a site and what ``megapg explain`` takes.
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
    title: str  # one line
    why: str  # what is in the way
    instead: str  # what to do by hand


_ALL = (
    Reason(
        "fallback",
        "serves where no collection was passed",
        "The code has a collection in a variable, and this is its branch for where that is None. "
        "The globals are what it means.",
        "Nothing. Once every caller passes a collection the branch can go.",
    ),
    Reason(
        "lifecycle",
        "makes or ends the groups",
        "initialize_model_parallel(), destroy_model_parallel() and the functions that they call "
        "own the groups. A collection is a value and makes none. Where none is at hand, whether "
        "there are groups is asked of Megatron, too; so are the groups that a function, or a test, "
        "has it make.",
        "Open a session where the program starts (with megapg.session(tp=..., pp=...) as session) "
        "and pass session.groups on. The session ends what it made.",
    ),
    Reason(
        "setter",
        "fakes a rank or a size, or reads the fake",
        "The set_* functions and the _MPU_* variables override what the groups say, mostly in "
        "converters that run without any groups. A frozen collection can't be overridden.",
        "Give the converter a collection of fake groups of the sizes that it asks for, or open a "
        "session over megapg.layout.ParallelLayout. Migrate the functions that it calls with it.",
    ),
    Reason(
        "vp-stage",
        "asks which model chunk is current",
        "With a virtual pipeline a rank has several model chunks. Which of them is current is "
        "state of the schedule, not of the groups, and from 0.13 on it is passed as vp_stage.",
        "Take vp_stage as a parameter (models and layers have it as self.vp_stage) and pass it: "
        "getters.is_pipeline_last_stage(pg, ignore_virtual=False, vp_stage=vp_stage).",
    ),
    Reason(
        "version",
        "means different things in the versions that may run it",
        "The call has another meaning, or other parameters, in some of the Megatron-core versions "
        "that this project admits.",
        "Name the version: --from-core 0.16, or from-core in [tool.megapg], or a closer pin of "
        "megatron-core. Keyword arguments instead of positional ones often help too.",
    ),
    Reason(
        "not-in-core",
        "no such name in this version",
        "The Megatron-core that this project runs on does not have the name: the call can't work, "
        "or stands in a branch for another version.",
        "Delete the branch, or name the version that it is for with --from-core.",
    ),
    Reason(
        "unknown-name",
        "no known version has the name",
        "parallel_state of no known version has it: a fork of Megatron-core, or a misspelling.",
        "Look at what the fork does there. The groups it returns can go into a collection with "
        "ProcessGroupCollection.from_groups(...).",
    ),
    Reason(
        "encoder-decoder",
        "sets the split between encoder and decoder, gone in 0.14",
        "Encoder and decoder on pipeline stages of their own were removed from Megatron-core, and "
        "a layout has no such split. What asks about it is rewritten; what sets it, or looks at "
        "its variables, is not. Where the two have tensor parallel sizes of their own a rank may "
        "be in several pipelines, up to 0.13: pg.pp and the ranks of its neighbours raise "
        "MissingGlobalGroupError there, unless the code asks isinstance(..., list) of them or goes "
        "through them.",
        "Delete the code, or ask getters.pipeline_split_rank(pg): None where nothing is split.",
    ),
    Reason(
        "no-field",
        "a group that no field holds",
        "The collection has no field for this group, and nothing in it is the same group; or the "
        "globals of this version hold the group where a collection does not look.",
        "Make the group with torch.distributed.new_group() where the session is opened, and pass "
        "it beside the collection.",
    ),
    Reason(
        "run-time-flag",
        "which group is meant shows at run time only",
        "An argument that chooses the group is no literal, and no helper takes it.",
        "Write an if on the flag with one field in each branch.",
    ),
    Reason(
        "unchecked",
        "tolerates groups that are not there",
        "check_initialized=False gives None where nothing is initialised; a collection has no "
        "such state for ranks, nor for a group that is chosen at run time. Or a try around it goes "
        "on after any error, and nothing but the globals serves: where these are forbidden, it "
        "would swallow the error that says so.",
        "Ask whether there is a collection (pg_collection is not None) and leave the argument, or "
        "the try, out.",
    ),
    Reason(
        "arguments",
        "arguments that can't be told",
        "The call passes *args or **kwargs, or arguments that this version does not take.",
        "Write the arguments out.",
    ),
    Reason(
        "no-state",
        "needs no groups",
        "The function only computes, or configures a communicator: there is nothing in it that a "
        "collection could serve.",
        "megapg.layout.ParallelLayout computes the ranks of every group, and megapg.session takes "
        "the options of communicators. What you keep can stay as it is: add '# megapg: keep'.",
    ),
    Reason(
        "buffer",
        "owns a global buffer",
        "It makes, hands out or drops a buffer of the process that belongs to no group.",
        "getters.memory_buffer(pg) is one buffer for each owner of groups. For a symmetric buffer "
        "keep one of your own beside the collection.",
    ),
    Reason(
        "assigned",
        "writes to the module",
        "Code assigns to an attribute of parallel_state: the reads that it wants to change are "
        "not reads of a collection any more once they are migrated. A function that writes private "
        "variables may have written anything: the private ones that it reads stay, too.",
        "Pass a collection that answers so. megapg.testing has collections of fake groups.",
    ),
    Reason(
        "patched",
        "patches a getter, in a test",
        "patch(), setattr() or a string names the getter. Code that was passed no collection still "
        "asks it, by its name in parallel_state, so most of these tests pass unchanged. Code that "
        "was passed one does not. A string that names what another module imported is rewritten "
        "where that import goes: nobody asks it any more.",
        "Run the test. Where it fails and the patch is of another module's name, patch the getter "
        "in megatron.core.parallel_state. Else pass a collection of fake groups of the size and "
        "rank that the patch pretends.",
    ),
    Reason(
        "as-value",
        "hands the getter on as a value",
        "The function itself is passed, stored or returned, not called: who calls it, and with "
        "what, can't be seen from here.",
        "Hand on a function that reads a collection: lambda: pg.rank('tp').",
    ),
    Reason(
        "module-as-value",
        "hands the module on as a value",
        "parallel_state as a whole is passed or returned, as in deepspeed.zero.Init(mpu=mpu): "
        "whoever gets it may read anything.",
        "Leave it if the receiver can't take groups, with '# megapg: keep'; "
        "megapg.megatron.published(pg) keeps it right.",
    ),
    Reason(
        "dynamic",
        "looks a name up at run time",
        "getattr(), hasattr() and the like ask the module by name, so that the code works with "
        "several versions, or with names that it was passed.",
        "Write the replacement of the name that is meant. Ask a collection with hasattr(pg, 'ep').",
    ),
    Reason(
        "ambiguous",
        "the name stands for different things",
        "The variable is bound more than once, to Megatron's module and to something else.",
        "Give the two a name each.",
    ),
    Reason(
        "in-a-string",
        "in an f-string, where it can't be written",
        "What would be written needs quotes, and the f-strings around it use both kinds; or the "
        'string shows the expression itself, as f"{x=}" does; or it is not certain where in the '
        "string the read begins.",
        "Take the read out of the string, into a variable before it.",
    ),
    Reason(
        "at-import",
        "asked when the module is imported",
        "Before there are groups the getter answers 0 at this place, and that is what is kept: no "
        "caller can pass a collection to it.",
        "Ask when the answer is needed, in a function that takes the collection.",
    ),
    Reason(
        "comment-inside",
        "a comment inside of the call",
        "The call goes as a whole, and the comment would go with it.",
        "Move the comment above the statement, and run the tool again.",
    ),
    Reason(
        "unverified",
        "the rewrite of its file was found unsound",
        "Undoing the edits on the new syntax tree did not give the old one, or the new file did "
        "not compile: it is as it was, and so is what would have relied on it. Or a function would "
        "have asked two carriers about one kind of groups, and the globals were none of the two.",
        "Rewrite it by hand, and report the file: the report says what was wrong.",
    ),
    Reason(
        "unwritten",
        "its file could not be written",
        "The file is read-only, was changed meanwhile, or the disk is full; or a file that it "
        "relies on was not written.",
        "The report names the cause. Run the tool again when it is gone.",
    ),
)

REASONS: Mapping[str, Reason] = {reason.code: reason for reason in _ALL}

UNSERVED = frozenset(
    {"unknown-name", "not-in-core", "no-field", "lifecycle", "setter", "no-state", "buffer"}
    | {"vp-stage", "encoder-decoder"}
)
"""The codes of uses that are about something that no collection tells."""

FALLBACK = "fallback"
"""The code of uses that stand in for a collection where there is none."""

CAUTIONS: Mapping[str, Reason] = {
    caution.code: caution
    for caution in (
        Reason(
            "may-be-none",
            "the answer is None on some ranks",
            "Unchecked, the getter gives None where this rank is outside of the group, or where it "
            "is not configured, and what is written does too. torch takes group=None for WORLD.",
            "Ask first: if pg.embd is not None. Or leave check_initialized=False out: what is "
            "written then raises where there is no group, as the getter does.",
        ),
        Reason(
            "private-global",
            "the variable is None until the groups are made",
            "The variable can be asked before there are groups; a collection can't. A list of "
            "ranks that is only read is rewritten: for None that fails, too.",
            "Ask whether there is a collection instead: pg_collection is not None.",
        ),
    )
}


def explain(code: str) -> Reason:
    """The reason or caution with that code.

    Raises:
        UnsupportedOptionError: there is none.
    """
    known = {**REASONS, **CAUTIONS}
    if code in known:
        return known[code]
    close = difflib.get_close_matches(code, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UnsupportedOptionError(f"no reason {code!r}.{hint} There are {', '.join(known)}.")
