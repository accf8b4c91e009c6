"""Chains of checkpoints: train on A, save, load on B, save, load on C, save, load on A, train on.

The kinds of outcomes:

* exact: every tensor of the three checkpoints has the same bits. So has the state on A, with its
  next three losses and norms. Every trait of the live parameter groups stays.
* rounded: the same, but for states whose type has to be rounded anew at each load.
* apart: the same, but for copies that Megatron-core trained apart. All copies get what was saved.
* refused: megapg refused a save or a load with one of its errors. Nothing was changed, and the last
  checkpoint before that loads on A.
* not built: Megatron-core can't build, describe or train such a job.
* wrong: anything else.
"""

import contextlib
import gc
import io
import json
import os
import pickle
import re
import shutil
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from chain_model import Job, can_run, parts_in_place, simpler, trains_copies_apart
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import FileSystemReader

import megapg
from megapg.checkpoint.contents import read_contents
from megapg.errors import MegapgError
from megapg.testing import run_distributed

RANKS = 4
TRAINED, MORE = 2, 3
ROUNDED = {"aware fp16": 2.0**-9, "aware fp8": 2.0**-2}
"""Optimizers whose states have a scale for each piece on a rank, and the error of one rounding.

Transformer Engine finds the scale anew whenever a state is set. Other pieces have other scales.
"""

_SCALED = re.compile(r"optimizer\d+\.group\d+\.\d+\.(exp_avg|exp_avg_sq|master_param):")
_BUGS = (AssertionError, KeyError, AttributeError, IndexError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a chain.

    Attributes:
        kind: "exact", "rounded", "apart", "refused", "not built" or "wrong".
        where: the leg and what it did: "B load".
        reason: the error's text, or the first differences.
        seconds: wall time.
    """

    kind: str
    where: str = ""
    reason: str = ""
    seconds: float = 0.0


class Team:
    """The ranks of ``run_distributed``, over its store. They stay in step without collectives."""

    def __init__(self):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(
            host, port, wait_for_workers=False, timeout=timedelta(seconds=90)
        )
        self.rank, self.turn = int(os.environ["RANK"]), 0

    def gather(self, value):
        """Return the value of every rank, in rank order."""
        self.turn += 1
        self.store.set(f"turn {self.turn}/{self.rank}", pickle.dumps(value))
        found = [pickle.loads(self.store.get(f"turn {self.turn}/{r}")) for r in range(RANKS)]
        if self.turn > 2:
            self.store.delete_key(f"turn {self.turn - 2}/{self.rank}")
        return found


@dataclass
class Told:
    """The findings of one rank in a leg. ``at`` is its last action."""

    at: str = "build"
    error: str = ""
    bug: bool = False
    state: object = None
    changed: tuple = ()
    losses: tuple = ()
    slices: tuple = ()
    traits: tuple = ()


# -- one chain, on all ranks -----------------------------------------------------------------------


def run_chain(chain, directory, team):
    """Run one chain; return its outcome, the same on every rank."""
    started = time.monotonic()
    try:
        with parts_in_place(chain):
            outcome = _Run(chain, Path(directory), team).outcome()
    finally:
        gc.collect()
    return replace(outcome, seconds=time.monotonic() - started)


class _Run:
    def __init__(self, chain, directory, team):
        self.chain, self.directory, self.team = chain, directory, team
        self.files = {}  # iteration -> tensors, of rank 0
        self.common = {}

    def outcome(self):
        first, second, third = self.chain.layouts
        refusal = None
        begun = self._leg("A", first, 1, self._begin)
        if found := self._failed(begun, "A", building=True):
            return found  # if the save was refused, there is nothing to load
        for name, layout, iteration in (("B", second, 3), ("C", third, 4)):
            told = self._leg(name, layout, iteration, partial(self._pass_on, iteration=iteration))
            found = self._failed(told, name) or self._differs(told, name, iteration)
            if found and found.kind == "refused":
                refusal = found
                break
            if found:
                return found
        ended = self._leg("A again", first, 9, self._end)
        if found := self._failed(ended, "A again"):
            # A committed checkpoint must load on the layout that wrote it.
            after = f" after {refusal.where}" if refusal else ""
            return replace(found, kind="wrong", where=f"{found.where}{after}")
        fine = "rounded" if self.chain.optimizer in ROUNDED else "exact"
        return self._compared(begun, ended) or refusal or Outcome(fine)

    def _leg(self, name, layout, seed, work):
        """Run a part of the chain on the first ranks; return what every rank tells."""
        told = Told()
        try:
            if self.team.rank < layout.world:
                self._on_groups(name, layout, seed, work, told)
        except Exception as error:
            told.error, told.bug = _said(error), _is_bug(error)
            error.__traceback__ = None
        gc.collect()
        return self.team.gather(told)

    def _on_groups(self, name, layout, seed, work, told):
        store = dist.PrefixStore(f"{self.directory.name} {name}", self.team.store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.team.rank,
            world_size=layout.world,
            timeout=timedelta(seconds=30),
        )
        try:
            with megapg.session(timeout=30, **layout.sizes) as session:
                pg = session.groups
                with megapg.published(pg):
                    job = Job(self.chain, layout, pg, seed)
                try:
                    told.at = "describe"
                    with megapg.published(pg):
                        for chunk in unwrap_model(job.chunks):
                            chunk.sharded_state_dict(metadata={"dp_cp_group": pg.dp_cp})
                    work(job, told)
                finally:
                    job.let_go()
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    @contextlib.contextmanager
    def _showing(self, job):
        with contextlib.nullcontext() if self.chain.explicit else megapg.published(job.pg):
            yield

    # the legs, on one rank

    def _begin(self, job, told):
        told.at = "train"
        with megapg.published(job.pg):
            for number in range(TRAINED):
                job.step(number)
        told.state = job.state()
        told.at = "slices"
        with self._showing(job):
            told.slices = _boxes(megapg.slices_of(job.chunks, pg_collection=job.pg))
        self._save(job, told, TRAINED)
        told.at = "train"
        with megapg.published(job.pg):
            told.losses = tuple(job.step(TRAINED + number) for number in range(MORE))
        told.at = "end"

    def _pass_on(self, job, told, iteration):
        self._load(job, told)
        told.at = "slices"
        with self._showing(job):
            told.slices = _boxes(megapg.slices_of(job.chunks, pg_collection=job.pg))
        self._save(job, told, iteration)
        told.at = "end"

    def _end(self, job, told):
        self._load(job, told)
        told.state = job.state()
        told.at = "train"
        with megapg.published(job.pg):
            told.losses = tuple(job.step(TRAINED + number) for number in range(MORE))
        told.at = "end"

    def _load(self, job, told):
        told.at = "load"
        before, told.traits = job.state(), (job.traits(),)
        try:
            with self._showing(job):
                job.load(self.directory)
        except Exception:
            told.changed = _differences(before, job.state())
            raise
        told.traits = (*told.traits, job.traits())

    def _save(self, job, told, iteration):
        told.at = "save"
        before, there = job.state(), _visible(self.directory)
        try:
            with self._showing(job):
                job.save(self.directory, iteration)
        except Exception:
            told.changed = _differences(before, job.state())
            told.changed += tuple(sorted(there ^ _visible(self.directory)))
            raise
        told.changed = _differences(before, job.state())
        told.at = "read"
        if self.team.rank == 0:
            path = self.directory / f"iter_{iteration:07d}"
            self.files[iteration] = _whole_tensors(path)
            self.common[iteration] = _groups_in(path)

    # the judgement, on every rank

    def _failed(self, told, name, building=False):
        """Return the outcome of a leg in which a rank raised, None if none did."""
        errors = [(rank, each) for rank, each in enumerate(told) if each.error]
        if not errors:
            changed = next((each.changed for each in told if each.changed), ())
            if changed:
                return Outcome("wrong", f"{name} save", f"the save changed {changed[:4]}")
            return None
        # The other ranks lose their peer.
        first = [each for each in errors if "Connection closed by peer" not in each[1].error]
        first = first or errors
        rank, worst = next((each for each in first if each[1].bug), first[0])
        where, reason = f"{name} {worst.at}", f"rank {rank}: {worst.error}"
        if worst.at in ("build", "describe") or (building and worst.at == "train"):
            return Outcome("not built", where, reason)
        if any(each.bug for _, each in errors):
            return Outcome("wrong", where, reason)
        if changed := next((each.changed for each in told if each.changed), ()):
            return Outcome("wrong", where, f"refused after a change of {changed[:4]}: {reason}")
        if worst.at not in ("save", "load"):
            return Outcome("wrong", where, reason)
        return Outcome("refused", where, reason)

    def _differs(self, told, name, iteration):
        """Compare the checkpoint and the parameter groups of a leg with those of the first."""
        found = ()
        for each in told:
            if each.traits and each.traits[0] != each.traits[1]:
                found = (f"traits of groups: {_pairs(*each.traits)}",)
        found = found or _holes(told)
        if self.team.rank == 0 and not found:
            found = _compare(self.files[TRAINED], self.files[iteration], self.chain)
            if self.common[TRAINED] != self.common[iteration]:
                found += (f"groups {self.common[TRAINED]} -> {self.common[iteration]}",)
        found = next(filter(None, self.team.gather(found)), ())
        return Outcome("wrong", f"{name} load and save", "; ".join(found[:4])) if found else None

    def _compared(self, begun, ended):
        """Compare the last leg with the first, which is on the same layout."""
        steps, rounded = self._steps(), self.chain.optimizer in ROUNDED
        ranks = range(self.chain.layouts[0].world)
        why, apart = trains_copies_apart(self.chain), False
        for rank in ranks:
            one, other = begun[rank], ended[rank]
            found = _differences(one.state, other.state)
            if rounded:  # the next steps differ as well
                found = tuple(each for each in found if not _SCALED.match(each))
            others = [each.state for each in begun[: len(ranks)] if each is not one]
            if why and all(_had(others, each) for each in found):
                apart = apart or bool(found)
            elif found:
                return Outcome("wrong", "A again load", f"rank {rank}: {'; '.join(found[:4])}")
        if apart:
            return Outcome("apart", "A train", why)
        for rank in ranks:
            one, other = begun[rank], ended[rank]
            error = ROUNDED.get(self.chain.optimizer)
            if one.losses != other.losses and not (
                rounded and _close(one.losses, other.losses, error)
            ):
                return Outcome("wrong", "A again train", f"{one.losses} -> {other.losses}")
        if found := _holes(begun) or steps:
            return Outcome("wrong", "A save", "; ".join(found[:4]))
        return None

    def _steps(self):
        """Return the faults of the first checkpoint: parts that are missing, and other steps."""
        found = ()
        if self.team.rank == 0:
            least = 1 if self.chain.trains == "all" else 0  # layers that are frozen are absent
            found = tuple(
                f"{name} is covered {sorted(set(each.covered.flatten().tolist()))} times"
                for name, each in self.files[TRAINED].items()
                if not ((each.covered >= least) & (each.covered <= 1)).all()
            )
            steps = {step for step, _ in self.common[TRAINED]} - {None}
            if steps - {TRAINED}:
                found += (f"saved steps are {steps}",)
        return next(filter(None, self.team.gather(found)), ())


def _close(one, other, error):
    """Compare steps after states were rounded: the first is equal, the others learn the same.

    A state of eight bits moves by up to a quarter, and the norms of the next gradients with it.
    """
    near = all(
        abs(a[0] - b[0]) <= 0.05 * abs(a[0])
        and abs(a[2] - b[2]) <= max(0.05, 4 * error) * abs(a[2])
        for a, b in zip(one, other, strict=True)
    )
    return one[0] == other[0] and near


def _said(error):
    return f"{type(error).__name__}: {str(error)[:700]}"


def _is_bug(error):
    """True if an error, or one that caused it, is none that megapg means to raise."""
    while error is not None:
        if isinstance(error, _BUGS) and not isinstance(error, MegapgError):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(map(_is_bug, error.exceptions))
        if not isinstance(error, MegapgError) and error.__cause__ is None:
            return not isinstance(error, OSError)
        error = error.__cause__
    return False


def _visible(directory):
    """Return the names of the checkpoints, and the tracker's content."""
    if not directory.exists():
        return set()
    names = {each.name for each in directory.iterdir() if each.name.startswith("iter_")}
    tracker = directory / "latest_checkpointed_iteration.txt"
    return names | ({f"tracker {tracker.read_text()}"} if tracker.exists() else set())


def _differences(one, other):
    """Return the names that differ, with both values."""
    names = dict.fromkeys((*one, *other))
    return tuple(
        f"{name}: {one.get(name, 'absent')} -> {other.get(name, 'absent')}"
        for name in names
        if _plain(one.get(name, "absent")) != _plain(other.get(name, "absent"))
    )


def _had(states, difference):
    """True if what one rank has now is what another rank had, under a name with the same end."""
    name, _, values = difference.partition(": ")
    now, end = values.rpartition(" -> ")[2], name.rpartition(".")[2]
    return any(
        str(value) == now and key.endswith(end) for state in states for key, value in state.items()
    )


def _plain(value):
    return repr(value) if isinstance(value, float) and value != value else value


def _pairs(one, other):
    return [
        {key: (a.get(key), b.get(key)) for key in {*a, *b} if a.get(key) != b.get(key)}
        for a, b in zip(one, other, strict=False)
    ]


def _boxes(slices):
    return tuple((s.name, s.shape, s.offset, s.extent, s.replica) for s in slices.described)


def _holes(told):
    """Return the tensors that the main replicas of all ranks do not cover exactly once."""
    counts = {}
    for each in told:
        for name, shape, offset, extent, replica in each.slices:
            count = counts.setdefault(name, torch.zeros(shape, dtype=torch.int32))
            if not any(replica):
                box = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
                count[box] += 1
    return tuple(
        f"slices cover {name} {sorted(set(count.flatten().tolist()))} times"
        for name, count in counts.items()
        # Layers without an adapter are absent from the tensor of all layers.
        if not (count == 1).all() and ".adapter." not in name
    )


@dataclass(frozen=True)
class Whole:
    """A tensor of a checkpoint; ``covered`` counts the parts at each element."""

    tensor: torch.Tensor
    covered: torch.Tensor

    def differs(self, other, tolerance):
        """True if another tensor has other parts, another type or other values."""
        one, two = self.tensor, other.tensor
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return True
        if not torch.equal(self.covered, other.covered):
            return True
        if tolerance:
            allowed = tolerance * max(1e-30, float(one.abs().max()))
            return bool(((one - two).abs() > tolerance * one.abs() + tolerance * allowed).any())
        bits = (each.reshape(-1).view(torch.uint8) for each in (one, two))
        return not torch.equal(*bits)


def _whole_tensors(path):
    """Return each tensor of a checkpoint by its key, zero where no part covers it."""
    metadata = FileSystemReader(path).read_metadata()
    entries = {k: v for k, v in metadata.state_dict_metadata.items() if hasattr(v, "size")}
    found = {
        k: Whole(
            torch.zeros(v.size, dtype=v.properties.dtype), torch.zeros(v.size, dtype=torch.int8)
        )
        for k, v in entries.items()
    }
    files = {each.name: each.read_bytes() for each in path.glob("*.distcp")}
    for index, place in metadata.storage_data.items():
        if index.fqn in entries:
            content = files[place.relative_path][place.offset : place.offset + place.length]
            part = torch.load(io.BytesIO(content), weights_only=False)
            box = tuple(slice(o, o + n) for o, n in zip(index.offset, part.shape, strict=True))
            found[index.fqn].tensor[box] = part
            found[index.fqn].covered[box] += 1
    return found


def _compare(one, other, chain):
    """Return the tensors of two checkpoints that differ; buckets depend on the layout."""
    found = []
    for name in dict.fromkeys((*one, *other)):
        of_optimizer = name.startswith(("optimizer.", "chained_"))
        if chain.form == "dp_reshardable" and of_optimizer:
            continue
        tolerance = ROUNDED.get(chain.optimizer, 0.0) if of_optimizer else 0.0
        if name not in one or name not in other:
            found.append(f"{name} is only in the {'first' if name in one else 'later'} checkpoint")
        elif one[name].differs(other[name], tolerance):
            found.append(f"{name} {one[name].tensor.dtype} has other values")
    return tuple(found)


def _groups_in(path):
    """Return the set of (step, other values) of the parameter groups in the common state."""
    contents = read_contents(path)
    found = set()
    for group in _group_dicts(contents.common):
        left = ("params", "step", "is_expert_parallel", "lr_mult", "default_config")
        rest = {k: v for k, v in group.items() if k not in left and not isinstance(v, type)}
        step = group.get("step")
        step = float(step) if step is not None else None
        found.add((step, json.dumps(rest, sort_keys=True, default=str)))
    return found


def _group_dicts(value):
    if isinstance(value, dict):
        if isinstance(value.get("param_groups"), list):
            yield from value["param_groups"]
        for inner in value.values():
            yield from _group_dicts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _group_dicts(inner)


# -- many chains -----------------------------------------------------------------------------------


def run_on_rank(chains, root, lines=None):
    """Run the chains on this rank, one after the other; rank 0 appends each outcome to a file."""
    warnings.simplefilter("ignore")
    team, outcomes = Team(), []
    for number, chain in enumerate(chains):
        directory = Path(root) / f"chain{number}"
        outcome = run_chain(chain, directory, team)
        team.gather(None)
        if team.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            if lines is not None:
                with open(lines, "a") as file:
                    file.write(json.dumps({"chain": repr(chain), **vars(outcome)}) + "\n")
        outcomes.append(outcome)
    return outcomes


def run_chains(chains, root, lines=None):
    """Run chains on real ranks; return the outcome of each."""
    chains = list(chains)
    deadline = 60 + 90 * len(chains)
    env = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    outcomes = run_distributed(
        partial(run_on_rank, chains, str(root), lines),
        RANKS,
        deadline=deadline,
        preload=("settled", "chains"),
        env=env,
    )
    return outcomes[0]


def shrink(chain, root, kind="wrong", rounds=6):
    """Return the simplest chain with this outcome that is found."""
    for number in range(rounds):
        tried = list(dict.fromkeys(each for each in simpler(chain) if each != chain))
        tried = [each for each in tried if can_run(each)]
        outcomes = run_chains(tried, Path(root) / f"round{number}")
        same = [each for each, o in zip(tried, outcomes, strict=True) if o.kind == kind]
        if not same:
            break
        chain = same[0]
    return chain
