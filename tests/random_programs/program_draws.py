"""Random modules: layers of same shape between free steps, and a loss. All that is drawn comes from one generator."""

import random

from program_source import Source, Writer
from program_steps import ANY, MOST_ELEMENTS, SAME_SHAPE, linear, norm, scale

KINDS = ("tokens", "sequence", "features", "image")
BATCHES = (2, 4, 6, 8, 12)
Inputs = list[tuple[str, tuple[int, ...], int]]


def draw_source(kind: str, rng: random.Random) -> Source:
    """A module of one kind: tokens with a table and a cross-entropy, embedded sequences, feature vectors or images."""
    batch = rng.choice(BATCHES)
    if kind == "tokens":
        return _tokens(rng, batch)
    ranks = {"sequence": 2, "features": 1, "image": 3}
    w = Writer(rng, [batch])
    w.shape += [w.size(6 if kind == "image" else 12) for _ in range(ranks[kind])]
    inputs: Inputs = [("x", tuple(w.shape), 0)]
    layers = _layers(w) if kind == "sequence" and w.yes(0.7) else ""
    for _ in range(rng.randint(2, 6)):
        _step(w)
    if len(w.made) < 2:  # a layer may have no parameter
        scale(w)
    inputs += _loss(w)
    names = ", ".join(name for name, _, _ in inputs)
    return Source(layers + w.text("Model", names, _result(w)), tuple(inputs), batch)


def _step(w: Writer) -> None:
    w.rng.choice(ANY)(w)
    if w.elements > MOST_ELEMENTS:
        w.set(f"x.flatten(1)[:, :{MOST_ELEMENTS}]", [w.shape[0], MOST_ELEMENTS])


def _residual(w: Writer) -> None:
    """A branch of the residual stream, its norm before, behind or nowhere; both branches in parallel, or one."""
    where = w.choice("before", "before", "behind", "nowhere", "both")
    kept = f"r{len(w.lines)}"
    w.lines.append(f"{kept} = x")
    if where in ("before", "both"):
        norm(w)
    branch = w.rng.choice(SAME_SHAPE)
    branch(w)
    if where == "both":
        other = w.linear(w.shape[-1], w.shape[-1])
        w.set(f"{kept} + x + {other}({kept})")
    else:
        w.set(f"{kept} + x")
    if where == "behind":
        norm(w)


def _layers(w: Writer) -> str:
    """A layer that keeps the shape, several times in `w`; the text of its class."""
    layer = Writer(w.rng, list(w.shape))
    for _ in range(w.rng.randint(1, 2)):
        _residual(layer)
    stack = w.made_of(f"nn.ModuleList(Layer() for _ in range({w.choice(1, 2, 2, 3)}))")
    w.lines += [f"for layer in {stack}:", "    x = layer(x)"]
    return layer.text("Layer", "x", "x") + "\n\n"


def _tokens(rng: random.Random, batch: int) -> Source:
    w = Writer(rng, [batch])
    vocabulary, width, sequence = w.choice(8, 12, 15, 24), w.choice(4, 6, 8, 12), w.size(8)
    table = w.made_of(f"nn.Embedding({vocabulary}, {width})")
    w.set(f"{table}(ids)", [batch, sequence, width])
    if w.yes():
        w.set(f"x + {w.parameter(2 * sequence, width)}[: x.shape[1]]")
    layers = _layers(w)
    if w.yes(0.7):
        norm(w)
    if w.yes():
        logits = f"F.linear(x, {table}.weight)"  # tied
    else:
        if w.yes(0.3):
            linear(w)
        logits = f"{w.linear(w.shape[-1], vocabulary)}(x)"
    w.set(logits, [batch, sequence, vocabulary])
    if w.yes(0.2):
        w.set("10 * torch.tanh(x / 10)")
    reduction = w.choice("", "", ", reduction='sum'", ", ignore_index=1", ", label_smoothing=0.1")
    loss = w.choice(
        f"F.cross_entropy(x.flatten(0, 1), labels.flatten(){reduction})",
        f"F.cross_entropy(x.transpose(1, 2), labels{reduction})",
        f"F.cross_entropy(x[:, :-1].reshape(-1, {vocabulary}), labels[:, 1:].reshape(-1){reduction})",
    )
    w.lines.append(f"loss = {loss}")
    shape = (batch, sequence)
    inputs = (("ids", shape, vocabulary), ("labels", shape, vocabulary))
    return Source(layers + w.text("Model", "ids, labels", _result(w)), inputs, batch)


def _loss(w: Writer) -> Inputs:
    """The loss of ``x``, and the inputs it needs."""
    kind = w.choice("mse", "mean", "sum", "classes", "logsumexp", "l1", "bce")
    if kind == "classes":
        classes = w.size()
        if len(w.shape) > 2:
            w.set("x.flatten(1)", [w.shape[0], w.elements])
        w.set(f"{w.linear(w.shape[-1], classes)}(x)", [w.shape[0], classes])
        w.lines.append("loss = F.cross_entropy(x, target)")
        return [("target", (w.shape[0],), classes)]
    if kind in ("mse", "l1", "bce"):
        name = {"mse": "mse_loss", "l1": "smooth_l1_loss", "bce": "binary_cross_entropy_with_logits"}[kind]
        target = "target.sigmoid()" if kind == "bce" else "target"
        w.lines.append(f"loss = F.{name}(x, {target}, reduction={w.choice('mean', 'sum')!r})")
        return [("target", tuple(w.shape), 0)]
    losses = {"mean": "x.square().mean()", "sum": "torch.tanh(x).sum()", "logsumexp": f"x.logsumexp({w.dim()}).mean()"}
    w.lines.append(f"loss = {losses[kind]}")
    return []


def _result(w: Writer) -> str:
    return w.choice("loss", "{'loss': loss, 'x': x}")
