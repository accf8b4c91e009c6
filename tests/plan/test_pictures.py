"""Pictures of layouts: their folds, and what the terminal, SVG and HTML show."""

import io
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from megapg.layout import ParallelLayout
from megapg.tools.cli.plan_screen import show
from megapg.tools.plan import draw_svg, load_cluster, make_plan
from megapg.tools.plan.page import to_html
from megapg.tools.plan.picture import draw_picture
from megapg.tools.plan.screen import grid
from megapg.tools.plan.svg import COLOURS, PALE, STYLE, to_svg

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
LARGE = ParallelLayout(world_size=512, tp=8, pp=8, ep=8)
LAYOUTS = {
    "one rank": (ParallelLayout(world_size=1), "H100-8"),
    "half a node": (ParallelLayout(world_size=4, tp=2), "H100-8"),
    "uneven": (ParallelLayout(world_size=12, tp=2, pp=3), "H100-8"),
    "other ranks": (ParallelLayout(world_size=8, tp=2, ranks=range(15, 7, -1)), "H100-8"),
    "64 nodes": (LARGE, "64xH100-8"),
    "racks": (ParallelLayout(world_size=144, tp=4, pp=2, ep=18), "GB200-NVL72"),
    "16,384": (ParallelLayout(world_size=16384, tp=8, pp=16, ep=8), "H100-8"),
    "across": (ParallelLayout(world_size=16384, tp=2, cp=2, pp=8, ep=16, expt_tp=1), "A100-8"),
}


def drawn(name, **options):
    layout, cluster = LAYOUTS[name]
    return layout, draw_picture(layout, load_cluster(cluster), **options)


def pattern(numbers):
    """Return which local ranks are in one group."""
    return tuple(map(numbers.index, numbers))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("nodes", [1, 12, 64])
def test_the_nodes_that_are_left_out_repeat_those_that_are_drawn(name, nodes):
    layout, picture = drawn(name, nodes=nodes)
    size = len(next(iter(picture.ranks.values())))
    for panel in picture.panels:
        for field in panel.fields:
            groups = enumerate(layout.partition(field))
            number = {rank: place for place, group in groups for rank in group}
            all_nodes = {
                node: tuple(number.get(node * size + place) for place in range(size))
                for node in range(picture.nodes)
            }
            assert all(all_nodes[node] == cells for node, cells in panel.numbers.items())
        shown = {pattern(cells) for cells in panel.numbers.values()}
        for row in picture.rows if picture.repeats else ():
            for near, far in itertools.pairwise(row):
                for node in range(near + 1, far):
                    share = (node - near) / (far - near)
                    ends = zip(panel.numbers[near], panel.numbers[far], strict=True)
                    assert [a + share * (b - a) for a, b in ends] == [*all_nodes[node]]
        if picture.repeats:
            assert shown == {pattern(cells) for cells in all_nodes.values()}
    assert len(picture.ranks) <= max(nodes, 2 ** len(picture.rows))
    assert sum(hidden for _, hidden, _ in picture.gaps()) <= picture.nodes - len(picture.ranks)


def test_fields_of_equal_groups_share_a_panel():
    assert [panel.fields for panel in draw_picture(LARGE, load_cluster("H100-8")).panels] == [
        ("tp", "expt_tp"),
        ("pp",),
        ("dp", "ep"),
    ]


def test_the_node_of_the_rank_is_drawn():
    layout, picture = drawn("16,384", rank=4321)
    assert 4321 // 8 in picture.ranks
    for panel in picture.panels:
        at = panel.numbers[4321 // 8]
        assert at[4321 % 8] == panel.lit == layout.group_number(panel.fields[0], 4321)


# --- terminal -------------------------------------------------------------------------------------


def printed(name, **options):
    layout, cluster = LAYOUTS[name]
    plan = make_plan(layout, cluster, rank=options.get("rank"))
    out = io.StringIO()
    show(plan, plan.picture(**options), Console(file=out, width=80, color_system=None))
    return out.getvalue()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_terminal_needs_80_columns_and_no_colour(name):
    lines = printed(name).splitlines()
    assert max(map(len, lines)) <= 80
    # Longer lines of the grid would be wrapped.
    assert max(map(len, grid(drawn(name)[1]).plain.splitlines())) <= 80
    assert len(lines) < 140
    assert "…" not in "".join(lines)  # nothing is cut


def test_a_field_and_a_rank_light_up_their_groups():
    whole = printed("64 nodes", fields=("pp",), nodes=64)
    assert "  63   56 57 58 59 60 61 62 63\n" in whole
    assert "like these" not in whole
    of_rank = printed("64 nodes", rank=77)
    assert "   9    9  9  9  9  9[9]  9  9           .  .  .  .  .[13]  .  .\n" in of_rank
    assert "   1    .  .  .  .  .  .  .  .           .  .  .  .  . 13  .  .\n" in of_rank


# --- SVG ------------------------------------------------------------------------------------------


def cells(panel):
    return {
        int(cell.get("data-rank")): cell
        for cell in panel.iter(f"{SVG}g")
        if "cell" in (cell.get("class") or "").split()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_cell_has_its_group(name):
    layout, picture = drawn(name, rank=LAYOUTS[name][0].ranks[-1])
    root = ElementTree.fromstring(to_svg(picture))
    width, height = map(float, root.get("viewBox").split()[2:])
    assert width < 1800
    assert height < 2200
    panels = [each for each in root.iter(f"{SVG}g") if each.get("class") == "panel"]
    assert [each.get("data-field").split() for each in panels] == [
        [*panel.fields] for panel in picture.panels
    ]
    for panel, drawing in zip(picture.panels, panels, strict=True):
        group = layout.members(panel.fields[0], picture.rank)
        found = cells(drawing)
        assert found.keys() == {r for row in picture.ranks.values() for r in row if r is not None}
        for rank, cell in found.items():
            number = layout.group_number(panel.fields[0], rank)
            assert cell.get("data-group") == cell.findtext(f"{SVG}text") == str(number)
            assert ("lit" in cell.get("class").split()) == (rank in group)


def test_the_file_has_no_script_and_loads_nothing():
    text = to_svg(drawn("64 nodes")[1])
    assert not re.search(r"<script|<image|href|url\(|@import|\son\w+=", text)
    assert "prefers-color-scheme:dark" in text
    assert "@media screen" in text  # paper is light
    assert "others repeat" in text
    assert "others do not repeat" in to_svg(drawn("uneven", nodes=1)[1])


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_texts_have_the_contrast_of_wcag():
    def contrast(one, other):
        light, dark = sorted(map(luminance, (one, other)), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    on_paper = {"#ffffff": ("#1f2430", "#5b6478", "#b3420e")}
    on_paper |= {"#171a21": ("#e6e9f0", "#a5aec2", "#ffa07a")}
    for paper, texts in on_paper.items():
        for colour in (paper, *texts):
            assert colour in STYLE
        assert min(contrast(paper, text) for text in texts) >= 4.5
    assert min(contrast("#14171f", fill) for fill in (*COLOURS, *PALE)) >= 4.5


def test_a_layout_is_drawn_without_a_plan():
    layout = ParallelLayout(world_size=16, tp=2, pp=2)
    text = draw_svg(layout, "A100-8", fields=("tp",), rank=5)
    assert "on 2 nodes of A100-8" in text
    assert text.count('class="panel"') == 1
    assert text.count('class="cell lit') == 2


def test_the_picture_of_the_readme_is_up_to_date():
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"\$ megapg plan (.*)", readme)
    options = dict(re.findall(r"--([\w-]+) (\S+)", command))
    file, cluster = options.pop("svg"), options.pop("cluster")
    sizes = {name.replace("-", "_"): int(value) for name, value in options.items()}
    drawn_now = draw_svg(ParallelLayout(**sizes), cluster)
    assert (ROOT / file).read_text() == drawn_now, f"run megapg plan {command}"
    assert re.search(r"!\[.*\]\((.*)\)", readme)[1] == file


# --- HTML -----------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


def in_a_browser(tmp_path, script, **options):
    """Return the page after a script ran in it."""
    plan = make_plan(LARGE, "64xH100-8")
    file = tmp_path / "plan.html"
    page = to_html(plan, plan.picture(nodes=64, **options))
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([*command, profile, file.as_uri()], capture_output=True, timeout=120)
    return done.stdout.decode()


def point_at(selector):
    event = "new PointerEvent('pointerover', {bubbles: true})"
    return f"document.querySelector({json.dumps(selector)}).dispatchEvent({event});"


def lit_in(page):
    """Return the ranks of the cells that are lit up, by field."""
    parts = re.split(r'<g class="panel( lit)?" data-field="([\w ]+)"', page.partition("<main>")[2])
    return {
        field: [int(r) for r in re.findall(r'<g class="cell lit[^"]*" data-rank="(\d+)"', text)]
        or bool(panel)
        for panel, field, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
@pytest.mark.parametrize("rank", [0, 77])
def test_pointing_at_a_rank_lights_up_all_of_its_groups(tmp_path, rank):
    script = point_at(f'.panel[data-field="pp"] .cell[data-rank="{rank}"] rect')
    page = in_a_browser(tmp_path, script)
    assert lit_in(page) == {
        "tp expt_tp": [*LARGE.members("tp", rank)],
        "pp": [*LARGE.members("pp", rank)],
        "dp ep": [*LARGE.members("ep", rank)],
    }
    assert f">Rank {rank} is in tp, expt_tp group " in page
    assert page.count(" me") >= 3


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_pointing_at_a_field_lights_up_its_groups(tmp_path):
    page = in_a_browser(tmp_path, point_at('button[data-field="ep"]'))
    assert lit_in(page) == {"tp expt_tp": False, "pp": False, "dp ep": True}
    assert ">The groups of ep: 64 groups of 8, across 8 nodes.<" in page


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_the_rank_of_the_command_stays_lit(tmp_path):
    away = point_at('button[data-field="tp"]') + point_at("h2")
    page = in_a_browser(tmp_path, away, rank=77)
    assert lit_in(page)["pp"] == [*LARGE.members("pp", 77)]


def test_a_page_needs_no_other_file():
    plan = make_plan(LARGE)
    page = to_html(plan, plan.picture())
    assert not re.search(r"(src|href)=|@import|url\(|https?://(?!www.w3.org/2000/svg)", page)
    assert "{{" not in page
