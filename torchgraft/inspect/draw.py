"""A graph as a still picture: Graphviz text, and SVG for where there is no Graphviz."""

from __future__ import annotations

import html
import json

from torch.fx import GraphModule

from torchgraft.inspect.graph import Row, rows

_SHAPES = {"input": "invhouse", "output": "house", "constant": "cylinder", "call": "box"}


def dot(gm: GraphModule) -> str:
    """Graphviz text: `dot -Tsvg it.dot`."""
    lines = ["digraph graph_of_torchgraft {", "  node [fontname=monospace, fontsize=10];"]
    for row in rows(gm):
        label = json.dumps("\n".join(_label(row)), ensure_ascii=False)
        lines.append(f"  {json.dumps(row.name)} [label={label}, shape={_SHAPES[row.kind]}];")
        lines += [f"  {json.dumps(name)} -> {json.dumps(row.name)};" for name in row.inputs]
    return "\n".join([*lines, "}"]) + "\n"


def _label(row: Row) -> list[str]:
    return [text for text in (row.name, row.op if row.kind == "call" else "", row.type) if text]


_LETTER, _LINE, _GAP, _RANK = 6.2, 13, 24, 34


def svg(gm: GraphModule) -> str:
    """A picture in layers: each node below all that it uses."""
    table = {row.name: row for row in rows(gm)}
    layer: dict[str, int] = {}
    rank: dict[str, int] = {}  # a node's place in its layer
    counts: dict[int, int] = {}
    for row in table.values():
        layer[row.name] = depth = 1 + max((layer[name] for name in row.inputs), default=-1)
        rank[row.name] = counts.get(depth, 0)
        counts[depth] = rank[row.name] + 1
    wide = max(len(line) for row in table.values() for line in _label(row)) * _LETTER + 12
    high = 3 * _LINE + 10
    most = max(counts.values())
    spots = {
        name: (
            _GAP + (rank[name] + (most - counts[layer[name]]) / 2) * (wide + _GAP),
            _GAP + layer[name] * (high + _RANK),
        )
        for name in table
    }
    size = (_GAP + most * (wide + _GAP), _GAP + len(counts) * (high + _RANK))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]:.0f}" height="{size[1]:.0f}" '
        f'font-family="monospace" font-size="10">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8z" fill="#667"/></marker></defs>',
    ]
    edges = [(name, row.name) for row in table.values() for name in row.inputs]
    for source, target in edges:
        x1, y1 = spots[source][0] + wide / 2, spots[source][1] + high
        x2, y2 = spots[target][0] + wide / 2, spots[target][1]
        parts.append(
            f'<path d="M{x1:.1f},{y1:.1f}C{x1:.1f},{y1 + 20:.1f} {x2:.1f},{y2 - 20:.1f} '
            f'{x2:.1f},{y2:.1f}" fill="none" stroke="#667" marker-end="url(#tip)"/>'
        )
    for name, row in table.items():
        x, y = spots[name]
        fill = {"input": "#dcebff", "constant": "#eee", "output": "#dff3e0"}.get(row.kind, "#fff")
        parts.append(
            f'<g transform="translate({x:.1f},{y:.1f})"><title>{html.escape(row.line)}</title>'
            f'<rect width="{wide:.1f}" height="{high}" rx="4" fill="{fill}" stroke="#667"/>'
        )
        for i, line in enumerate(_label(row)):
            parts.append(f'<text x="6" y="{(i + 1) * _LINE + 2}">{html.escape(line)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"
