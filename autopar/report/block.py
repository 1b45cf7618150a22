"""One block's sharding drawn on its graph: boxes in layers from top to bottom, placements below them."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from autopar.report.svg import short, tag
from autopar.search.result.report_data import BlockGraph, GraphEdge
from autopar.words.numbers import capped

BOX, HIGH, ROW, COLUMN, LANE = 190.0, 38.0, 70.0, 236.0, 14.0
_MOST_CHARS = 30  # of a box
MOST_PLACEMENT = 46
BELOW = 19.0  # pixels of a wire that pass behind the placement


def drawing(graph: BlockGraph) -> dict[str, Any]:
    """The block as SVG and its size in pixels; a narrow screen scrolls it."""
    columns = _columns(graph)
    widest = max(sum(node.layer == layer for node in graph.nodes) for layer in {node.layer for node in graph.nodes})
    middle = [column * COLUMN for column in columns]
    shift = BOX / 2 + 8 - min(middle)
    boxes = {i: (middle[i] + shift, 8 + node.layer * ROW) for i, node in enumerate(graph.nodes)}
    right = max(x for x, _ in boxes.values()) + BOX / 2
    long = [edge for edge in graph.edges if graph.nodes[edge.target].layer - graph.nodes[edge.source].layer > 1]
    long.sort(key=lambda edge: graph.nodes[edge.target].layer - graph.nodes[edge.source].layer)  # inner lanes: short
    lanes = {id(edge): right + LANE * (1 + i) for i, edge in enumerate(long)}
    width = right + LANE * (1 + len(long)) + 8
    content = [_edge(edge, boxes, lanes) for edge in graph.edges]
    content += [_placements(graph, boxes)]
    content += [_box(graph, i, boxes[i]) for i in range(len(graph.nodes))]
    height = 16 + HIGH + ROW * max(node.layer for node in graph.nodes)
    says = f"graph of block {graph.name}: {len(graph.nodes)} boxes in {widest} columns"
    return {"content": Markup("").join(content), "width": width, "height": height, "says": says}


def _columns(graph: BlockGraph) -> list[float]:
    """Where each node stands in its layer: as its sources do, spread evenly around the middle."""
    sources: Mapping[int, list[int]] = {i: [] for i in range(len(graph.nodes))}
    for edge in graph.edges:
        sources[edge.target].append(edge.source)
    place = [0.0] * len(graph.nodes)
    for layer in sorted({node.layer for node in graph.nodes}):
        mine = [i for i, node in enumerate(graph.nodes) if node.layer == layer]
        near = {i: sum(place[s] for s in sources[i]) / len(sources[i]) if sources[i] else 0.0 for i in mine}
        for position, i in enumerate(sorted(mine, key=lambda i: (near[i], i))):
            place[i] = position - (len(mine) - 1) / 2
    return place


def _edge(edge: GraphEdge, boxes: Mapping[int, tuple[float, float]], lanes: Mapping[int, float]) -> Markup:
    (x, y), (to_x, to_y) = boxes[edge.source], boxes[edge.target]
    if id(edge) in lanes:
        lane, start, end = lanes[id(edge)], y + HIGH / 2, to_y + HIGH / 2
        path = f"M{short(x + BOX / 2)} {short(start)}H{short(lane)}V{short(end)}H{short(to_x + BOX / 2 + 5)}"
    else:
        start, end = y + HIGH + BELOW, to_y - 5
        points = ((x, end), (to_x, start), (to_x, end))
        path = f"M{short(x)} {short(y + HIGH)}V{short(start)}C" + " ".join(
            f"{short(px)} {short(py)}" for px, py in points
        )
    return tag("path", d=path, class_="wire") + _arrow(edge, boxes, lanes)


def _arrow(edge: GraphEdge, boxes: Mapping[int, tuple[float, float]], lanes: Mapping[int, float]) -> Markup:
    x, y = boxes[edge.target]
    if id(edge) in lanes:
        tip, middle = x + BOX / 2, y + HIGH / 2
        return tag("path", d=f"M{short(tip)} {short(middle)}l6 -4v8z", class_="tip")
    return tag("path", d=f"M{short(x)} {short(y)}l-4 -6h8z", class_="tip")


def _placements(graph: BlockGraph, boxes: Mapping[int, tuple[float, float]]) -> Markup:
    """The placement of each box's value, written once below the box."""
    texts = []
    for i, (x, y) in boxes.items():
        placements = dict.fromkeys(edge.placement for edge in graph.edges if edge.source == i and edge.placement)
        if placements:
            text = next(iter(placements)).replace("a sum over", "partial over").replace(" still to come", "")
            where = {"x": short(x), "y": short(y + HIGH + 15), "data_t": "\n".join(placements)}
            texts.append(tag("text", capped(text, MOST_PLACEMENT), class_="placement", **where))
    return Markup("").join(texts)


def _box(graph: BlockGraph, number: int, at: tuple[float, float]) -> Markup:
    node, (x, y) = graph.nodes[number], at
    detail = tag("text", capped(node.detail, _MOST_CHARS + 4), x=short(x), y=short(y + 31), class_="detail")
    label_y = y + (16 if node.detail else 24)
    left, kind = short(x - BOX / 2), f"box {node.kind}"
    rect = tag("rect", x=left, y=short(y), width=short(BOX), height=short(HIGH), rx="6", class_=kind)
    shown = node.label if len(node.label) <= _MOST_CHARS else f"…{node.label[1 - _MOST_CHARS :]}"  # the end says most
    label = tag("text", shown, x=short(x), y=short(label_y), class_="label")
    tip = f"{node.label}\n{node.detail}".strip()
    return tag("g", rect, label, detail if node.detail else Markup(""), data_t=tip, class_=f"node {node.kind}")
