"""A picture as SVG: one file without scripts, for light and dark screens and for paper."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from textwrap import wrap

from megapg.tools.plan.bars import LETTERS, PARTS, Bar, Memory, text_of_bytes
from megapg.tools.plan.picture import Panel, Picture

# Eight colours that people with any colour vision tell apart, light enough for dark text: Paul
# Tol's scheme "light". Then the same ones pale with a frame, and pale with a bar. Every cell has
# the number of its group as well.
COLOURS = (
    *("#77aadd", "#ee8866", "#eedd88", "#ffaabb"),
    *("#99ddff", "#44bb99", "#bbcc33", "#aaaa00"),
)
PALE = (
    *("#dbe8f6", "#fadfd6", "#fbf6de", "#ffe6ea"),
    *("#e3f6ff", "#cdeee4", "#edf2c8", "#e8e8bd"),
)
STYLE = """
.megapg text{font-family:system-ui,sans-serif;font-size:11px;fill:#1f2430}
.megapg .paper{fill:#ffffff}
.megapg .node{fill:none;stroke:#8a93a6}
.megapg .h1{font-size:17px;font-weight:600}
.megapg .h2{font-size:14px;font-weight:600}
.megapg .about{font-size:12px;font-weight:400}
.megapg .quiet{fill:#5b6478}
.megapg .small{font-size:9.5px}
.megapg .cell text{fill:#14171f;text-anchor:middle;font-variant-numeric:tabular-nums}
.megapg .part text{fill:#14171f;text-anchor:middle}
.megapg .limit{stroke:#b3420e;stroke-width:2;stroke-dasharray:5 3}
.megapg .none rect{fill:none;stroke:#8a93a6;stroke-dasharray:2 2}
.megapg .none text{fill:#5b6478}
.megapg.on .cell{opacity:.22}
.megapg.on .lit{opacity:1}
.megapg.on .lit .box{stroke:#14171f;stroke-width:1.2}
.megapg.on .me .box{stroke-width:3}
.megapg.on .me text{font-weight:700}
.megapg .slow{fill:#b3420e}
@media screen and (prefers-color-scheme:dark){
.megapg text{fill:#e6e9f0}
.megapg .paper{fill:#171a21}
.megapg .quiet,.megapg .none text{fill:#a5aec2}
.megapg .node{stroke:#7b849a}
.megapg.on .lit .box{stroke:#ffffff}
.megapg .slow{fill:#ffa07a}
.megapg .limit{stroke:#ffa07a}
}
"""

_ACROSS = 8  # cells in a line of a node
_HEIGHT = 17  # of a cell
_MARGIN, _GAP, _MORE = 20, 10, 34
_BAR, _BARS = 22, 640  # height of a bar, and least width of all
_LINE = 1150  # widest picture with several panels in a line; three stay below each other


def to_svg(picture: Picture, memory: Memory | None = None) -> str:
    """Return the picture as the text of an SVG file, with a bar for each pipeline stage below."""
    cell = 10 + 6.4 * max(len(str(n)) for panel in picture.panels for n in (0, *_numbers(panel)))
    drawn = [_Drawing(picture, panel, max(cell, 18)) for panel in picture.panels]
    fitting = int((_LINE + 3 * _GAP) // (drawn[0].width + 3 * _GAP))
    columns = max(1, min(len(drawn) if drawn[0].width < _LINE / 3 else len(drawn) // 2, fitting))
    legend = _legend(picture)
    texts = max(11 * len(picture.title), 5.9 * max(map(len, legend)))
    if memory is not None:
        texts = max(texts, _BARS)
    width = max(columns * (drawn[0].width + 3 * _GAP) - 3 * _GAP, texts) + 2 * _MARGIN
    top, parts = 62.0, []
    for start in range(0, len(drawn), columns):
        line = drawn[start : start + columns]
        for place, drawing in enumerate(line):
            left = _MARGIN + place * (drawing.width + 3 * _GAP)
            parts.append(f'<g transform="translate({left:g} {top:g})">{drawing.text}</g>')
        top += line[0].height + 2 * _GAP
    lines = "".join(
        f'<text class="quiet" x="{_MARGIN}" y="{top + 8 + 16 * n:g}">{escape(text)}</text>'
        for n, text in enumerate(legend)
    )
    height = top + 16 * len(legend) + 8
    if memory is not None:
        bars, room = _memory(memory, width - 2 * _MARGIN)
        lines += f'<g class="memory" transform="translate({_MARGIN} {height + 30:g})">{bars}</g>'
        height += room + 30
    lit = " on" * (picture.rank is not None)
    about = "Each field's groups on the grid of nodes by local ranks."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="megapg{lit}" '
        f'role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<title>{escape(picture.title)}</title><desc>{about}</desc><style>{STYLE}</style>"
        f'<rect class="paper" width="{width:g}" height="{height:g}" rx="8"/>'
        f'<text class="h1" x="{_MARGIN}" y="34">{escape(picture.title)}</text>'
        f"{''.join(parts)}{lines}</svg>\n"
    )


def _numbers(panel: Panel) -> Iterator[int]:
    for row in panel.numbers.values():
        yield from (number for number in row if number is not None)


def _legend(picture: Picture) -> list[str]:
    text = (
        "A frame is a node, a cell is a rank. Cells of a panel with the same number are one group."
    )
    if picture.rank is not None:
        text += f" The groups of rank {picture.rank} are lit up."
    gap = next((hidden for _, hidden, _ in picture.gaps() if hidden), 0)
    more = f" +{gap:,} stands for {gap:,} more nodes." if gap else ""
    return [text, picture.note + more] if picture.note else [text]


def _memory(memory: Memory, width: float) -> tuple[str, float]:
    """Return the bars of the stages, and the height that they take."""
    label = 10 + 6.2 * max(len(bar.name) for bar in memory.bars)
    scale = (width - label - 70) / memory.longest
    parts = ['<text class="h2">Memory of a rank by pipeline stage</text>']
    parts += _text(memory.job, 19, width)
    x, y = 0.0, 16.0 + 16 * len(parts)
    for letter, part, colour in zip(LETTERS, PARTS, COLOURS, strict=False):
        box = _part(letter, x, y, 16, colour)
        parts.append(f'{box}<text x="{x + 21:g}" y="{y + 15:g}">{part}</text>')
        x += 34 + 6.4 * len(part)
    top = y = y + _BAR + 8
    for bar in memory.bars:
        if hidden := memory.gap_before(bar):
            parts.append(f'<text class="quiet" y="{y + 12:g}">+{hidden:,} stages</text>')
            y += 18
        parts.append(_bar(bar, y, label, scale))
        y += _BAR + 4
    edge = label + scale * memory.limit
    parts.append(
        f'<path class="limit" d="M{edge:g} {top - 4:g}V{y:g}"/>'
        f'<text class="slow" text-anchor="end" x="{edge:g}" y="{y + 12:g}">'
        f"{memory.gpu} of a GPU</text>"
    )
    about = [*_text(memory.verdict, y + 34, width), *_text(memory.assumptions, y + 50, width)]
    return "".join([*parts, *about]), y + 34 + 16 * len(about)


def _text(text: str, y: float, width: float) -> list[str]:
    """Return a text in as many lines as it needs."""
    return [
        f'<text class="quiet" y="{y + 16 * n:g}">{escape(line)}</text>'
        for n, line in enumerate(wrap(text, int(width / 5.9)))
    ]


def _bar(bar: Bar, y: float, label: float, scale: float) -> str:
    x = label
    drawn = [f'<text x="0" y="{y + 15:g}">{bar.name}</text>']
    for letter, part, size, colour in zip(LETTERS, PARTS, bar.sizes, COLOURS, strict=False):
        about = f"{part}: {text_of_bytes(size)}"
        drawn.append(_part(letter, x, y, scale * size, colour, about))
        x += scale * size
    drawn.append(f'<text x="{x + 6:g}" y="{y + 15:g}">{text_of_bytes(bar.cost.total)}</text>')
    return f'<g class="bar" data-stage="{bar.label}">{"".join(drawn)}</g>'


def _part(letter: str, x: float, y: float, width: float, colour: str, about: str = "") -> str:
    middle = f'x="{x + width / 2:g}" y="{y + 15:g}"'
    text = f"<text {middle}>{letter}</text>" if width >= 12 else ""
    title = f"<title>{about}</title>" if about else ""
    return (
        f'<g class="part"><rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_BAR}" '
        f'fill="{colour}" stroke="#14171f" stroke-width=".5"/>{text}{title}</g>'
    )


class _Drawing:
    """One panel: its text, and the room that it takes."""

    def __init__(self, picture: Picture, panel: Panel, cell: float) -> None:
        size = len(next(iter(picture.ranks.values())))
        self._picture, self._panel, self._cell = picture, panel, cell
        drawn = sorted({*_numbers(panel)})
        self._order = {number: place for place, number in enumerate(drawn)}
        self._across = min(size, _ACROSS)
        self._node_width = self._across * cell + 6
        self._node_height = -(-size // self._across) * _HEIGHT + 6
        self.width = self.height = 0.0
        style = "slow" if panel.span.link == "network" else "quiet"
        head = (
            f'<text class="h2" y="0">{escape(panel.name)}'
            f'<tspan class="about {style}" dx="8">'
            f"{escape(panel.caption)}</tspan></text>"
        )
        field = " ".join(panel.fields)
        self.text = f'<g class="panel" data-field="{field}">{head}{"".join(self._nodes())}</g>'

    def _nodes(self) -> Iterator[str]:
        x, y = 0.0, 12.0
        for node, hidden, is_first in self._picture.gaps():
            if is_first and node:
                x, y = 0.0, y + self._node_height + 18
                if hidden:
                    yield f'<text class="quiet small" x="2" y="{y + 10:g}">+{hidden:,} nodes</text>'
                    y += 14
            elif hidden:
                middle = y + 16 + self._node_height / 2
                yield (
                    f'<text class="quiet" text-anchor="middle" x="{x + _MORE / 2 - 4:g}" '
                    f'y="{middle:g}">+{hidden:,}<title>{hidden:,} more nodes</title></text>'
                )
                x += _MORE
            yield self._node(node, x, y)
            x += self._node_width + _GAP
            self.width = max(self.width, x - _GAP)
            self.height = y + self._node_height + 18

    def _node(self, node: int, x: float, y: float) -> str:
        ranks, numbers = self._picture.ranks[node], self._panel.numbers[node]
        present = [rank for rank in ranks if rank is not None]
        label = f"{present[0]}-{present[-1]}" if present else ""
        cells = "".join(map(self._one, ranks, numbers, range(len(ranks))))
        return (
            f'<g transform="translate({x:g} {y + 14:g})">'
            f'<text class="small quiet" x="2" y="-4">node {node}</text>'
            f'<text class="small quiet" text-anchor="end" x="{self._node_width - 2:g}" y="-4">'
            f"{label}</text>"
            f'<rect class="node" width="{self._node_width:g}" height="{self._node_height:g}" '
            f'rx="3"/>{cells}</g>'
        )

    def _one(self, rank: int | None, number: int | None, place: int) -> str:
        x = 3 + place % self._across * self._cell
        y = 3 + place // self._across * _HEIGHT
        box = f'x="{x + 0.5:g}" y="{y + 0.5:g}" width="{self._cell - 1:g}" height="{_HEIGHT - 1}"'
        if rank is None:
            return ""
        middle = f'x="{x + self._cell / 2:g}" y="{y + 12.5:g}"'
        if number is None:
            cell = f'<rect {box} rx="2"/><text {middle}>-</text>'
            return f'<g class="cell none" data-rank="{rank}">{cell}</g>'
        kind, colour = divmod(self._order[number], len(COLOURS))
        fill = COLOURS[colour] if kind % 3 == 0 else PALE[colour]
        frame = f' stroke="{COLOURS[colour]}" stroke-width="2"' if kind % 3 == 1 else ""
        bar = f'x="{x + 0.5:g}" y="{y + _HEIGHT - 4.5:g}" width="{self._cell - 1:g}" height="4"'
        bar = f'<rect {bar} fill="{COLOURS[colour]}"/>' if kind % 3 == 2 else ""
        lit = " lit" * (number == self._panel.lit) + " me" * (rank == self._picture.rank)
        about = f"<title>rank {rank}: group {number} of {self._panel.name}</title>"
        return (
            f'<g class="cell{lit}" data-rank="{rank}" data-group="{number}">'
            f'<rect class="box" {box} rx="2" fill="{fill}"{frame}/>{bar}'
            f"<text {middle}>{number}</text>{about}</g>"
        )
