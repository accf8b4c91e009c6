"""Compare plans with a map of single elements, and check every error of the planner."""

import time
from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapg.errors import RefitError
from megapg.rl.refit.moves import Part, find_moves
from megapg.rl.refit.rounds import padded, rounds_of
from megapg.rl.refit.slices import Slice, Slices

RANKS = 3


def whole(name, *shape, dtype="float32", **more):
    return Slice(name, shape, dtype, 4, (0,) * len(shape), shape, **more)


def box_of(name, shape, offset, extent, **more):
    return Slice(name, shape, "float32", 4, offset, extent, **more)


def elements(offset, shape):
    axes = (range(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
    return list(product(*axes))


def values(each):
    """Return position in the slice -> (tensor, position in the tensor)."""
    inside = elements((0,) * len(each.extent), each.extent)
    return {
        at: (each.name, tuple(a + b for a, b in zip(at, each.offset, strict=True))) for at in inside
    }


def carried_out(moves, gives, takes):
    """Return rank -> number of the slice -> position -> the values that arrive there."""
    arrived = [[{at: [] for at in values(each)} for each in slices] for slices in takes]
    for move in moves:
        source = values(gives[move.sender][move.given])
        axes = len(move.given_offset) - len(move.shape)
        shape = (1,) * axes + move.shape[max(-axes, 0) :]
        for a, b in zip(
            elements(move.given_offset, shape),
            elements(move.taken_offset, move.shape),
            strict=True,
        ):
            arrived[move.receiver][move.taken][b].append(source[a])
    return arrived


@st.composite
def cuts(draw, name, shape):
    """Draw the slices of one tensor on each rank: a grid, whose cells have one holder or more."""
    bounds = [
        sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
    ]
    slices = [[] for _ in range(RANKS)]
    for cell in product(*(list(pairwise(each)) for each in bounds)):
        offset = tuple(begin for begin, _ in cell)
        extent = tuple(end - begin for begin, end in cell)
        for rank in draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
            slices[rank].append(box_of(name, shape, offset, extent))
    # Other boxes, which overlap the cells.
    for rank in draw(st.sets(st.integers(0, RANKS - 1))):
        offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
        extent = tuple(
            draw(st.integers(1, size - begin)) for size, begin in zip(shape, offset, strict=True)
        )
        slices[rank].append(box_of(name, shape, offset, extent))
    return slices


@st.composite
def parts(draw, source, shape):
    """Draw targets that consist of the source's layers, each with its rows in another order."""
    layers, rows, *rest = shape
    zeros = (0,) * len(rest)
    names = {}
    for layer in range(layers):
        cut = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=2))})
        at, made = 0, []
        for begin, end in draw(st.permutations(list(pairwise(cut)))):
            size = (end - begin, *rest)
            made.append(Part(source, (layer, begin, *zeros), (at, *zeros), size))
            at += end - begin
        names[f"layer {layer}"] = made
    return names


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_element_arrives_once(data):
    shapes = [
        tuple(data.draw(st.lists(st.integers(1, 4), min_size=axes, max_size=axes)))
        for axes in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    ]
    gives, takes = ([[] for _ in range(RANKS)] for _ in range(2))
    names = {}
    origin = {}
    for number, shape in enumerate(shapes):
        name = f"tensor {number}"
        for rank, slices in enumerate(data.draw(cuts(name, shape))):
            gives[rank] += slices
        targets = {name: shape}
        origin |= {(name, at): (name, at) for at in elements((0,) * len(shape), shape)}
        if len(shape) > 1 and data.draw(st.booleans()):
            made = data.draw(parts(name, shape))
            targets = {f"{number} {target}": shape[1:] for target in made}
            names |= {f"{number} {target}": each for target, each in made.items()}
            for target, each in made.items():
                for part in each:
                    extent = (1, *part.shape)
                    for a, b in zip(
                        elements(part.source_offset, extent),
                        elements(part.offset, part.shape),
                        strict=True,
                    ):
                        origin[f"{number} {target}", b] = (name, a)
        for target, cut in targets.items():
            for rank, slices in enumerate(data.draw(cuts(target, cut))):
                takes[rank] += slices
    moves = find_moves(gives, takes, [names] * RANKS)
    arrived = carried_out(moves, gives, takes)
    for rank, slices in enumerate(takes):
        for number, each in enumerate(slices):
            expected = {at: [origin[value]] for at, value in values(each).items()}
            assert arrived[rank][number] == expected
    # No element is sent to a rank that holds it.
    for rank in range(RANKS):
        held = {value for each in gives[rank] for value in values(each).values()}
        lacked = sum(
            origin[value] not in held for each in takes[rank] for value in values(each).values()
        )
        sent = [each for each in moves if each.receiver == rank != each.sender]
        assert sum(each.nbytes for each in sent) == 4 * lacked
    # The rounds carry the same elements, and each fits.
    limit = data.draw(st.integers(16, 64))
    local = [each for each in moves if each.sender == each.receiver]
    rounds = rounds_of(moves, limit)
    together = [*local, *(each for moves in rounds for each in moves)]
    assert carried_out(together, gives, takes) == arrived
    for each in rounds:
        used = Counter()
        for move in each:
            used[move.sender] += padded(move)
            used[move.receiver] += padded(move)
        assert each
        assert max(used.values()) <= limit


def test_senders_share_the_work_and_hosts_are_kept():
    gives = [
        [whole(f"t{number}", 8) for number in range(6)] if rank < 3 else [] for rank in range(6)
    ]
    takes = [[] if rank < 3 else gives[0] for rank in range(6)]
    moves = find_moves(gives, takes)
    assert Counter(move.sender for move in moves) == {0: 6, 1: 6, 2: 6}
    hosts = ["a", "b", "b", "a", "b", "c"]
    moves = find_moves(gives, takes, hosts=hosts)
    assert {move.sender for move in moves if move.receiver == 3} == {0}
    assert {move.sender for move in moves if move.receiver == 4} <= {1, 2}
    assert find_moves(gives, takes, hosts=hosts) == moves


def test_other_padding_is_left():
    gives = [[whole("vocabulary", 8, 2, resizable=True)], []]
    takes = [
        [],
        [whole("vocabulary", 6, 2, resizable=True), whole("vocabulary", 6, 2, resizable=True)],
    ]
    assert [move.shape for move in find_moves(gives, takes)] == [(6, 2)] * 2
    (move,) = find_moves([takes[1][:1], []], [[], gives[0]])
    assert move.shape == (6, 2)


HALF = box_of("w", (4, 2), (0, 0), (2, 2))


@pytest.mark.parametrize(
    ("gives", "takes", "names", "message"),
    [
        ([], [whole("w", 4)], {}, r"^w: rank 1 .* takes it, and no rank gives it"),
        ([whole("v", 4)], [whole("w", 4)], {"w": "x"}, r"^w \(from x\): .* no rank gives it"),
        ([HALF], [whole("w", 4, 2)], {}, r"^w: no rank gives w\[2:4, 0:2\], which rank 1"),
        ([whole("w", 4)], [whole("w", 5)], {}, r"^w: .* takes shape \[5\], .* has \[4\]"),
        (
            [whole("w", 4, dtype="bfloat16")],
            [whole("w", 4)],
            {},
            "^w: rank 1 .* takes float32, and the source has bfloat16",
        ),
        (
            [whole("w", 4), whole("w", 5)],
            [whole("w", 4)],
            {},
            r"^w: rank 0 .* float32 of shape \[4\], and rank 0 gives float32 of shape \[5\]",
        ),
        (
            [whole("v", 4)],
            [whole("w", 4)],
            {"w": [Part("v", (0,), (0,), (3,))]},
            r"^w\[3:4\]: no part",
        ),
        (
            [whole("v", 4)],
            [whole("w", 4)],
            {"w": [Part("v", (0,), (0,), (3,)), Part("v", (0,), (2,), (2,))]},
            r"^w\[2:3\]: two parts",
        ),
        (
            [whole("v", 4)],
            [whole("w", 4)],
            {"w": [Part("v", (1,), (0,), (4,))]},
            r"^w \(from v\): Part\(.*\) does not lie inside",
        ),
        (
            [whole("v", 2, 4)],
            [whole("w", 4)],
            {"w": [Part("v", (0,), (0,), (4,))]},
            r"^w \(from v\): Part\(.*\) does not lie inside",
        ),
    ],
)
def test_an_error_names_the_tensor_and_the_range(gives, takes, names, message):
    with pytest.raises(RefitError, match=message):
        find_moves([gives, []], [[], takes], [{}, names])


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2, "slices": []}', '{"version": 1}'])
def test_another_form_of_slices_is_refused(text):
    with pytest.raises(RefitError, match=r"no JSON form|version 2"):
        Slices.from_json(text)


def test_large_models_are_planned_in_seconds():
    """Plan a model of 70B parameters from tp8 pp4 dp1 on 32 ranks to tp4 dp8 on 32 others."""
    layers, hidden, ffn, qkv, words = 80, 8192, 28672, 10240, 128256

    def held(tp, tp_size, stage):
        of_layer = {
            "qkv": ((qkv, hidden), 0, 1),
            "proj": ((hidden, hidden), 1, 1),
            "fc1": ((2 * ffn, hidden), 0, 2),
            "fc2": ((hidden, ffn), 1, 1),
            "norm1": ((hidden,), None, 1),
            "norm2": ((hidden,), None, 1),
        }
        for layer in stage:
            for name, (shape, axis, pieces) in of_layer.items():
                for piece in range(pieces):
                    offset, extent = [0] * len(shape), list(shape)
                    if axis is not None:
                        extent[axis] //= tp_size * pieces
                        offset[axis] = (piece * tp_size + tp) * extent[axis]
                    yield Slice(
                        *(name, (layers, *shape), "bfloat16", 2),
                        *((layer, *offset), (1, *extent)),
                    )
        for name in ("words", "head"):
            size = words // tp_size
            if (0 if name == "words" else layers - 1) in stage:
                yield Slice(name, (words, hidden), "bfloat16", 2, (tp * size, 0), (size, hidden))

    gives = [[*held(r % 8, 8, range(r // 8 * 20, r // 8 * 20 + 20))] for r in range(32)]
    takes = [[*held(r % 4, 4, range(layers))] for r in range(32)]
    started = time.process_time()
    moves = find_moves([*gives, *([] for _ in takes)], [*([] for _ in gives), *takes])
    planned = time.process_time()
    rounds = rounds_of(moves, 64 << 20)
    print(
        f"{len(moves)} moves, {len(rounds)} rounds: {planned - started:.1f} s to plan, "
        f"{time.process_time() - planned:.1f} s for the rounds"
    )
    sent = Counter()
    for move in moves:
        sent[move.sender] += move.nbytes
    assert max(sent.values()) < 1.1 * min(sent.values())
    assert time.process_time() - started < 30
