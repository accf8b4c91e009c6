"""A plan as one HTML file, in which pointing at a rank or a field lights up its groups."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from megapg.tools.plan.overview import TRAFFIC, Plan
from megapg.tools.plan.picture import Picture
from megapg.tools.plan.spans import text_of_ranks
from megapg.tools.plan.svg import to_svg

_TEMPLATE = Path(__file__).with_name("page.html")


def to_html(plan: Plan, picture: Picture) -> str:
    """Return the text of a file that needs no other file and no network."""
    parts = {
        "title": escape(picture.title),
        "picture": to_svg(picture, plan.memory),
        "fields": _fields(plan),
        "traffic": _traffic(plan),
        "findings": _findings(plan),
        "groups": json.dumps(_groups(plan, picture)),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in parts.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def _groups(plan: Plan, picture: Picture) -> dict[str, dict[int, str]]:
    """Return the ranks of every drawn group as text, by field and number."""
    found: dict[str, dict[int, str]] = {}
    for panel in picture.panels:
        ranks = found[" ".join(panel.fields)] = {}
        for node, numbers in panel.numbers.items():
            for rank, number in zip(picture.ranks[node], numbers, strict=True):
                if number is not None and number not in ranks and rank is not None:
                    members = plan.layout.members(panel.fields[0], rank)
                    ranks[number] = text_of_ranks(members)
    return found


def _fields(plan: Plan) -> str:
    rows = []
    for span in plan.spans:
        if span.size > 1:
            nodes = "-".join(f"{n:,}" for n in sorted({*span.nodes}))
            cells = (span.field, f"{span.size:,}", f"{span.count:,}", nodes, span.link)
            rows.append(f'<tr data-field="{span.field}"><td>{"</td><td>".join(cells)}</td></tr>')
    return "\n".join(rows)


def _traffic(plan: Plan) -> str:
    """Return the heading and the table of the rank's traffic; nothing without a model."""
    if plan.training is None:
        return ""
    rows = ["<tr><th>" + "</th><th>".join(TRAFFIC) + "</th></tr>"]
    rows += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in plan.traffic]
    table = "\n".join(rows)
    return (
        f"<h2>Traffic of rank {plan.rank} in one step</h2>\n<table class='traffic'>{table}</table>"
    )


def _findings(plan: Plan) -> str:
    found = [f"<li><b>{escape(each.what)}</b> {escape(each.cure)}</li>" for each in plan.findings]
    return "\n".join(found) or "<li>None.</li>"
