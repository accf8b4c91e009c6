"""Run the functions of several trees on the same ranks, and print the results as JSON.

Each tree has its own processes.

    python runtime_ranks.py FOLDER...

This module does not import megapg, and a tree in a folder called ``vendored`` cannot.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

WORLD = 4
FIELDS = ["tp", "pp", "cp", "dp", "dp_cp", "mp", "embd"]


class Block:
    """Blocks the import of megapg."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "megapg":
            raise ModuleNotFoundError(f"{name} is not to be imported here")


class Model(torch.nn.Module):
    """A model that may carry a collection of Megatron-core."""

    def __init__(self, pg_collection: object) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        if pg_collection is not None:
            self.pg_collection = pg_collection


def outcome(function: Callable[..., Any], *args: object, **more: object) -> object:
    """Return the result, or the kind of error."""
    try:
        return function(*args, **more)
    except AssertionError:
        return "no such group"


def on_a_rank(folder: Path, rank: int) -> dict[str, object]:
    """Return all values to compare."""
    if folder.name == "vendored":
        sys.meta_path.insert(0, Block())
    sys.path.insert(0, str(folder))
    store = dist.FileStore(str(folder / "store"), WORLD)
    found: dict[str, object] = {}
    work = importlib.import_module("trainer.work")
    found["before"] = outcome(work.place)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups(FIELDS)
    for name in ("step", "place", "gathered"):
        function = getattr(work, name)
        found[name] = function()
        takes_it = "pg_collection" in function.__code__.co_varnames
        found[f"{name}, passed"] = function(pg_collection=groups) if takes_it else found[name]
    for name, model in (("plain", Model(None)), ("carrying", Model(groups))):
        found[f"norm of one {name}"] = work.norm(model)
    found["uses megapg"] = any(name.partition(".")[0] == "megapg" for name in sys.modules)
    parallel_state.destroy_model_parallel()
    found["after"] = outcome(work.place)
    dist.destroy_process_group()
    return found


def main(folders: list[Path]) -> None:
    """Fork the ranks of one tree after the other."""
    for folder in folders:
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                code = 1
                with contextlib.suppress(KeyboardInterrupt):
                    try:
                        said = json.dumps(on_a_rank(folder, rank))
                        (folder / f"rank{rank}.json").write_text(said)
                        code = 0
                    except BaseException:
                        import traceback

                        traceback.print_exc()
                os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise SystemExit(f"{folder}: exit codes {codes}")


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
