"""Refuse input that can't be compared, with errors that say what to change."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType

from megapg.collection import ProcessGroupCollection
from megapg.errors import ParityInputError
from megapg.tools.parity.cases import LayoutCase
from megapg.tools.parity.comparison import Shard

_FRAMES = 3  # of the user's code in an error
_HERE = str(Path(__file__).parents[2])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@contextlib.contextmanager
def naming(what: str, hint: str = "") -> Iterator[None]:
    """Turn errors of the block into an error that names the layout and the part."""
    try:
        yield
    except ParityInputError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:300]
        rank = f" on rank {dist.get_rank()}" if dist.get_world_size() > 1 else ""
        raise ParityInputError(
            f"{what} raised {type(error).__name__}{rank}: {text}{hint}{places(error)}"
        ) from error


def places(error: BaseException) -> str:
    """Return the last lines of the user's code that an error passed, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_HERE, *_INSTALLED, "<"))]
    return "".join(
        f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in own[-_FRAMES:] or frames[-1:]
    )


def chunks_of(made: object, case: LayoutCase, pg: ProcessGroupCollection) -> list[torch.nn.Module]:
    """Return the chunks that ``build`` made, once they are known to be comparable."""
    chunks: list[torch.nn.Module] = []
    where = f"layout {case.text!r}: build"
    for chunk in made if isinstance(made, list | tuple) else [made]:
        if not isinstance(chunk, torch.nn.Module) or not hasattr(chunk, "sharded_state_dict"):
            raise ParityInputError(
                f"{where} returned {type(chunk).__name__}. Return a Megatron-core module (it has "
                "sharded_state_dict and config), or the list of a virtual pipeline's chunks."
            )
        if getattr(chunk, "config", None) is None:
            raise ParityInputError(
                f"{where} returned a {type(chunk).__name__} without config. Derive it from "
                "MegatronModule, and pass the config there."
            )
        if not hasattr(chunk, "set_input_tensor") and case.layout.pp == 1:
            vars(chunk)["set_input_tensor"] = _take_no_input
        if not hasattr(chunk, "model_type"):
            vars(chunk)["model_type"] = ModelType.encoder_or_decoder
        chunks.append(chunk)
    expected = case.layout.vpp or 1
    if len(chunks) != expected:
        raise ParityInputError(
            f"{where} returned {len(chunks)} chunks, and {expected} are needed (vpp). Return a "
            "list, or take vp_stage=: then build is called once per chunk."
        )
    if case.world_size > 1 and not any(_holds(chunk, pg) for chunk in chunks):
        raise ParityInputError(
            f"{where} ignores the groups it gets: no module holds pg or one of its groups. Pass "
            "pg_collection=pg to the model."
        )
    odd = {str(p.dtype) for chunk in chunks for p in chunk.parameters() if p.is_floating_point()}
    odd -= {"torch.float32", "torch.float64"}
    if odd:
        raise ParityInputError(
            f"{where} makes parameters of {', '.join(sorted(odd))}, whose rounding hides faults. "
            "Build the model in float32; it is compared in float64 if it can be."
        )
    return chunks


def _take_no_input(tensor: object) -> None:
    """Take the input of another stage: the only stage has none."""


def _holds(chunk: torch.nn.Module, pg: ProcessGroupCollection) -> bool:
    """True if a module of the chunk was given the collection or one of its groups.

    A model that took its groups from Megatron's globals holds Megatron's own collection instead.
    """
    groups = {id(getattr(pg, name)) for name in pg.present()}
    values = [value for module in chunk.modules() for value in vars(module).values()]
    if any(value is pg for value in values):
        return True
    core = any(type(value).__name__ == "ProcessGroupCollection" for value in values)
    return not core and any(id(value) in groups for value in values)


def check_described(undescribed: Sequence[str], case: LayoutCase) -> None:
    """Refuse parameters that no checkpoint would hold."""
    if undescribed:
        raise ParityInputError(
            f"layout {case.text!r}: sharded_state_dict of the model leaves out "
            f"{', '.join(undescribed[:3])}. Parity compares what it describes, and a checkpoint "
            "saves it. Add them there."
        )


def check_same_build(shards: Sequence[Shard], pg: ProcessGroupCollection, case: LayoutCase) -> None:
    """Refuse a model of which two ranks disagree. Every rank calls it."""
    if case.world_size == 1:
        return
    mine = (
        (pg.rank("pp"), pg.rank("ep")),
        {shard.name: (shard.key, shard.whole) for shard in shards},
    )
    everyone: list[tuple[tuple[int, int], dict[str, tuple[str, tuple[int, ...]]]]]
    everyone = [mine for _ in range(case.world_size)]
    dist.all_gather_object(everyone, mine)
    first: dict[tuple[int, int], int] = {}
    whole: dict[str, tuple[int, tuple[int, ...]]] = {}
    for rank, (place, names) in enumerate(everyone):
        other = first.setdefault(place, rank)
        for name in sorted(names.keys() ^ everyone[other][1].keys()):
            has, lacks = (rank, other) if name in names else (other, rank)
            raise ParityInputError(
                f"layout {case.text!r}: build differs between ranks: rank {has} has {name}, and "
                f"rank {lacks} of the same stage has not. Build the same modules on both."
            )
        for name, (key, shape) in names.items():
            known, expected = whole.setdefault(key, (rank, shape))
            if expected != shape:
                raise ParityInputError(
                    f"layout {case.text!r}: build differs between ranks: {name} is a part of "
                    f"shape {list(expected)} on rank {known}, and of {list(shape)} on rank {rank}."
                )
