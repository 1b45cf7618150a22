"""Random modules by structure: layers joined by skip connections, shared submodules, several outputs, constants.

The steps of `program_steps` draw operators. This file draws the connections of layers. A layer may take and return
values beside the stream. Several layers may be one module. Values of earlier layers may meet again later.
"""

import random
from collections.abc import Callable

from program_source import Source, Writer
from program_steps import SAME_SHAPE, activation, linear, norm, scale

Structure = Callable[["_Model"], None]
BATCHES = (2, 4, 6)


class _Model:
    """The module's body `w`, its layer `layer` with the values it takes and returns beside the stream."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.batch, self.length, self.width = rng.choice(BATCHES), rng.choice((2, 4, 6)), rng.choice((4, 6, 8))
        shape = [self.batch, self.length, self.width]
        self.w, self.layer = Writer(rng, list(shape)), Writer(rng, list(shape))
        self.count = rng.choice((2, 3, 4, 4, 5))
        self.init = ""  # an argument of the layer's constructor

    def stack(self) -> str:
        """The layers: modules of their own, one module several times, or two that take turns."""
        given = "0.1 * k" if self.init else ""
        kind = self.rng.choice(("own", "own", "one", "turns"))
        held = {"own": self.count, "one": 1, "turns": 2}[kind]
        layers = f"nn.ModuleList(Layer({given}) for k in range({held}))"
        if self.w.yes(0.7):
            self.w.made.append(f"self.layers = {layers}")
            stack = "self.layers"
        else:  # the layers of one module whose name ends in a number
            stack = self.w.made_of(layers)
        return stack if kind == "own" else self.w.made_of(f"[{stack}[k % {held}] for k in range({self.count})]")


def draw_structure(rng: random.Random) -> Source:
    """A module of embedded sequences: one structure of layers, free steps before and behind it, and a loss."""
    m = _Model(rng)
    if m.w.yes(0.3):
        m.w.choice(activation, scale, several, constant)(m.w)  # the layers have this width
    for _ in range(rng.randint(1, 2)):
        _inner(m.layer)
    head = "self, scale=0.5" if m.layer.yes(0.3) else "self"
    if head != "self":
        m.init = "scale"
        m.layer.made.append("self.scale = scale")
        m.layer.set("x * (1 + self.scale)")
    extra, more, returned = rng.choice(STRUCTURES)(m)
    if len(m.w.made) < 2 and not m.layer.made:
        scale(m.w)
    if m.w.yes(0.3):
        _free(m.w)
    loss = m.w.choice(
        "F.mse_loss(x, target)", "(x * target).sum()", "(x - target).abs().mean(0).sum()", "x.square().mean()"
    )
    m.w.lines.append(f"loss = {loss}")
    names = "x, target" if "target" in loss else "x"
    inputs = [("x", (m.batch, m.length, m.width), 0)] + [("target", tuple(m.w.shape), 0)] * ("target" in loss)
    result = m.w.choice(
        "loss", "{'loss': loss, 'x': x}", *(["{'loss': loss, 'kept': kept[0], 'x': x}"] if more else [])
    )
    layer = m.layer.text("Layer", f"x{extra}", returned).replace("__init__(self)", f"__init__({head})")
    return Source(layer + "\n\n" + m.w.text("Model", names, result), tuple(inputs), m.batch)


def _free(w: Writer) -> None:
    w.choice(activation, norm, scale, several, constant, linear)(w)


def _inner(w: Writer) -> None:
    """A branch beside the stream, whose result is added to it."""
    kept = f"r{len(w.lines)}"
    w.lines.append(f"{kept} = x")
    if w.yes():
        norm(w)
    w.rng.choice((*SAME_SHAPE, several, several, constant, constant, biased_attention))(w)
    w.set(f"{kept} + x")


def several(w: Writer) -> None:
    """An operator with several outputs. The program uses some or all of them. The shape stays."""
    d, made = w.dim(), w.name()
    size = w.shape[d]
    kind = w.choice(
        "max",
        "min",
        "sort",
        "topk",
        "var_mean",
        "std_mean",
        "aminmax",
        "unbind",
        "split",
        "chunk",
        "median",
        "cummax",
        "tensor_split",
    )
    if kind in ("max", "min", "median"):
        w.lines.append(f"{made}, {made}i = x.{kind}({d}, keepdim=True)")
        w.set(w.choice(f"x - {made}", f"x + {made} * ({made}i + 1)", f"x * 0.5 + {made}"))
    elif kind in ("sort", "cummax"):
        w.lines.append(f"{made}, {made}i = x.{kind}({d})")
        w.set(w.choice(f"x + {made}", f"x + {made} / ({made}i + 1)"))
    elif kind == "topk":
        w.lines.append(f"{made}, {made}i = x.topk({min(2, size)}, {d})")
        w.set(
            w.choice(
                f"x + {made}.sum({d}, keepdim=True)",
                f"x + {made}.mean({d}, keepdim=True) + {made}i.amax({d}, keepdim=True)",
            )
        )
    elif kind in ("var_mean", "std_mean"):
        if size < 3:
            return
        w.lines.append(f"{made}, {made}m = torch.{kind}(x, {d}, keepdim=True)")
        w.set(f"(x - {made}m) / ({made} + 1)")
    elif kind == "aminmax":
        w.lines.append(f"{made}, {made}m = torch.aminmax(x, dim={d}, keepdim=True)")
        w.set(w.choice(f"(x - {made}) / (1 + {made}m - {made})", f"x + {made}m"))
    elif kind == "unbind":
        w.lines.append(f"{made} = x.unbind({d})")
        w.set(w.choice(f"torch.stack({made}[::-1], {d})", f"x + {made}[0].unsqueeze({d})"))
    elif kind == "tensor_split":
        w.lines.append(f"{made} = x.tensor_split({w.choice(2, 3)}, {d})")
        w.set(f"torch.cat([piece * 0.5 for piece in {made}][::-1], {d})")
    elif kind == "split" and size > 2:
        w.lines.append(f"{made}, {made}r = x.split([1, {size - 1}], {d})")
        w.set(f"torch.cat([{made}r, {made}], {d})")
    elif kind == "chunk" and size % 2 == 0:
        w.lines.append(f"{made}, {made}r = x.chunk(2, {d})")
        w.set(f"torch.cat([{made}r.tanh(), {made}], {d})")


def constant(w: Writer) -> None:
    """A tensor that `forward` makes of sizes alone, and that meets the stream."""
    length, width = w.shape[1], w.shape[-1]
    rows, both = "torch.arange(x.shape[1], dtype=x.dtype, device=x.device)", f"torch.arange({width}, dtype=x.dtype)"
    made = w.name()
    options = [
        f"x + {rows}.div({length})[:, None]",
        f"x * torch.linspace(0.5, 1, {width}, dtype=x.dtype)",
        "x + torch.ones_like(x).cumsum(1)",
        f"x @ torch.eye({width}, dtype=x.dtype)",
        "torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x",
        "x + x.new_tensor([0.5])",
        "x * x.new_full((1, 1, 1), 0.5)",
        f"x + torch.sin({rows}[:, None] / 10 ** ({both} / {width}))",
        f"x + torch.outer({rows}, {both}) / 10",
        f"x.masked_fill(torch.arange(x.shape[1])[:, None] > {length // 2}, 0.0)",
        "torch.where(torch.ones(x.shape[1], 1, dtype=torch.bool), x, 0.0)",
        f"x + F.one_hot(torch.arange(x.shape[1]), {max(length, width)})[:, :{width}]",
        "x + torch.zeros(x.shape[0], 1, 1, dtype=x.dtype)",
        f"x + torch.tensor([0.1, 0.2], dtype=x.dtype).repeat({width // 2})",
        "x + torch.tensor(0.3)",
        "x[:, torch.arange(x.shape[1]).flip(0)]",
        "x + x[:, [0]]",
        f"x.index_select(2, torch.tensor({list(range(width))[::-1]}))",
    ]
    if w.yes(0.3):
        indexing, turned = w.choice(("ij", ""), ("xy", ".t()"))
        w.lines.append(f"{made}, {made}c = torch.meshgrid({rows}, {both}, indexing={indexing!r})")
        w.set(f"x + ({made} - 0.5 * {made}c){turned} / 10")
    elif w.yes(0.3):
        table = w.parameter(2 * length - 1 + 5, width)
        w.lines.append(f"{made} = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None] + {length + 1}")
        w.set(f"x + {table}[{made}].mean(1)")
    else:
        w.set(w.rng.choice(options))


def biased_attention(w: Writer) -> None:
    """Attention with a bias that depends on positions alone, or on a learned table of distances."""
    width, heads, head = w.shape[-1], w.choice(1, 2, 3, 4), w.choice(2, 3)
    q, k, v = (w.name() + s for s in "qkv")
    for name in (q, k, v):
        w.lines.append(f"{name} = {w.linear(width, heads * head)}(x).unflatten(-1, ({heads}, {head})).transpose(1, 2)")
    bias = w.name() + "b"
    w.lines.append(f"{bias} = torch.arange(x.shape[1])[None, :] - torch.arange(x.shape[1])[:, None]")
    kind = w.choice("alibi", "table", "window", "float", "infinite", "expanded")
    if kind == "alibi":
        w.lines.append(
            f"{bias} = {bias} * torch.tensor([0.5 ** h for h in range({heads})], dtype=x.dtype)[:, None, None]"
        )
    elif kind == "table":
        table = w.parameter(2 * w.shape[1] + 5, heads)
        w.lines.append(f"{bias} = {table}[{bias}.clamp(-{w.shape[1]}, {w.shape[1]}) + {w.shape[1]}].permute(2, 0, 1)")
    elif kind == "window":
        w.lines.append(f"{bias} = {bias}.abs() <= 1")
    elif kind == "float":
        w.lines.append(f"{bias} = -{bias}.abs().to(x.dtype)")
    elif kind == "infinite":
        w.lines.append(
            f"{bias} = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype).masked_fill({bias} > 0, float('-inf'))"
        )
    else:
        w.lines.append(f"{bias} = -{bias}.abs().to(x.dtype).expand(x.shape[0], {heads}, -1, -1)")
    if w.yes() or kind == "window":
        w.set(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={bias})")
    else:
        w.set(f"torch.softmax({q} @ {k}.transpose(-1, -2) / {head}**0.5 + {bias}, -1) @ {v}")
    w.set(f"{w.linear(heads * head, width)}(x.transpose(1, 2).flatten(2))")


def plain(m: _Model) -> tuple[str, bool, str]:
    m.w.lines += ["kept = []", f"for layer in {m.stack()}:", "    x = layer(x)", "    kept.append(x)"]
    if m.w.yes():
        m.w.set(
            m.w.choice("sum(kept)", "torch.stack(kept).mean(0)", "torch.stack(kept, -1).amax(-1)", "kept[0] + kept[-1]")
        )
    return "", True, "x"


def u_net(m: _Model) -> tuple[str, bool, str]:
    """The results of the first half meet the second half, last first."""
    join = m.w.choice("x + kept.pop()", "torch.cat([x, kept.pop()], -1)", "kept.pop() - x")
    layers, half = m.stack(), m.count // 2
    m.w.lines += ["kept = []", f"for layer in {layers}[:{half}]:", "    x = layer(x)", "    kept.append(x)"]
    m.w.lines += [f"for layer in {layers}[{half}:]:", "    if kept:"]
    if "cat" in join:
        mixed = m.w.made_of(f"nn.Linear({2 * m.width}, {m.width})")
        join = f"{mixed}({join})"
    m.w.lines += [f"        x = {join}", "    x = layer(x)"]
    return "", False, "x"


def dense(m: _Model) -> tuple[str, bool, str]:
    """A layer sees all results before it: their sum, their mean, or the first and the last."""
    seen = m.w.choice(
        "sum(kept)",
        "torch.stack(kept).mean(0)",
        "kept[0] + kept[-1]",
        "torch.stack([w * h for w, h in zip(weights, kept)]).sum(0)",
    )
    weights = m.w.parameter(m.count + 1)
    m.w.lines += [
        "kept = [x]",
        f"weights = {weights}.unbind()",
        f"for layer in {m.stack()}:",
        f"    kept.append(layer({seen}))",
    ]
    m.w.set("kept[-1] * weights[-1]")
    return "", True, "x"


def first_value(m: _Model) -> tuple[str, bool, str]:
    """A layer returns a second value; later layers mix the second value of an earlier layer with theirs."""
    own = m.layer.linear(m.width, m.width)
    m.layer.lines.insert(0, f"own = {own}(x)")
    m.layer.lines.insert(
        1,
        "value = own if first is None else "
        + m.layer.choice("0.5 * (own + first)", "own.lerp(first, 0.3)", "torch.cat([own, first], -1)[..., ::2]"),
    )
    m.layer.set(m.layer.choice("x + value", "x * value.sigmoid()", "torch.where(value > 0, x, value)"))
    carried = m.w.choice(
        "first = value if first is None else first",
        "first = value",
        "first = value + 1 if first is None else value - first",
    )
    m.w.lines += ["first = None", f"for layer in {m.stack()}:", "    x, value = layer(x, first)", f"    {carried}"]
    if m.w.yes():
        m.w.set("x + value")
    return ", first", False, m.layer.choice("x, value", "x, own")


def shared_parts(m: _Model) -> tuple[str, bool, str]:
    """Modules that every layer gets: a norm, a projection; and a bias computed once before the layers."""
    part = m.w.made_of(
        m.w.choice(
            f"nn.Linear({m.width}, {m.width})",
            f"nn.LayerNorm({m.width})",
            f"nn.Sequential(nn.Linear({m.width}, 5), nn.GELU(), nn.Linear(5, {m.width}))",
        )
    )
    m.layer.set(m.layer.choice("part(x) + x", "x + part(x) * bias", "part(x * bias)", "bias + part(x)"))
    bias = m.w.choice(
        "torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10",
        f"{m.w.parameter(m.width)}",
        "x.mean(1, keepdim=True)",
        "torch.ones(1, dtype=x.dtype)",
        "x[:, :1]",
    )
    m.w.lines += [f"bias = {bias}", f"for layer in {m.stack()}:", f"    x = layer(x, {part}, bias)"]
    return ", part, bias", False, "x"


def two_streams(m: _Model) -> tuple[str, bool, str]:
    """Two streams that each layer mixes; their ends differ, and one may be left out."""
    m.layer.set(
        m.layer.choice(
            "x + y.mean(1, keepdim=True)",
            "x * y.tanh()",
            "x + y.flip(1)",
            "torch.softmax(x @ y.transpose(1, 2), -1) @ y + x",
        )
    )
    other = m.layer.linear(m.width, m.width)
    m.layer.lines.append(f"y = y + {other}(x)")
    start = m.w.choice(
        "x",
        "x * 0.5",
        "torch.zeros_like(x)",
        f"{m.w.parameter(m.length, m.width)}.expand(x.shape[0], -1, -1)",
        "x.flip(1)",
    )
    turned = m.w.choice("x, y = layer(x, y)", "y, x = layer(x, y)", "x, y = layer(y, x)")
    m.w.lines += [f"y = {start}", f"for layer in {m.stack()}:", f"    {turned}"]
    if m.w.yes(0.7):
        m.w.set(m.w.choice("x + y", "torch.cat([x, y], 1)[:, ::2]", "y"))
    return ", y", False, "x, y"


def other_ends(m: _Model) -> tuple[str, bool, str]:
    """Beside the stream, each layer's result ends in a value of another shape."""
    m.w.lines += [
        "kept = []",
        f"for layer in {m.stack()}:",
        f"    x = {m.w.choice('x.flip(1)', 'x.roll(1, 2)', 'x', 'x.reshape(x.shape)')}",
    ]
    end = m.w.choice("x.mean(1)", "x[:, 0]", "x.flatten(1)", "x.amax(-1)", "x.unflatten(-1, (2, -1)).sum(-2)")
    m.w.lines += ["    x = layer(x)", f"    kept.append({end})"]
    m.w.lines.append("x = x + sum(k.sum() for k in kept)")
    return "", True, "x"


STRUCTURES = (plain, u_net, dense, first_value, shared_parts, two_streams, other_ends)
