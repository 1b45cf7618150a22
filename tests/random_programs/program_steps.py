"""The operators of random programs: each step draws its sizes and writes its lines."""

from collections.abc import Callable

from program_source import Writer

Step = Callable[[Writer], None]
MOST_ELEMENTS = 144  # of one sample


def linear(w: Writer) -> None:
    size = w.size()
    w.set(f"{w.linear(w.shape[-1], size)}(x)", [*w.shape[:-1], size])


def activation(w: Writer) -> None:
    w.set(w.choice("F.gelu(x)", "F.silu(x)", "torch.tanh(x)", "F.relu(x).square()", "F.softplus(x)", "x * x.sigmoid()"))


def norm(w: Writer) -> None:
    last = w.shape[-1]
    kind = w.choice("nn.LayerNorm({})", "nn.RMSNorm({})", "nn.LayerNorm({}, bias=False)")
    if last < 3:
        w.set("x / (1 + x.square().mean(-1, keepdim=True)).sqrt()")
    elif w.yes(0.2) and len(w.shape) > 2:
        w.set(f"{w.made_of(kind.format(w.shape[-2:]))}(x)")
    else:
        w.set(f"{w.made_of(kind.format(last))}(x)")


def group_norm(w: Writer) -> None:
    channels = w.shape[1]
    groups = w.rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
    if len(w.shape) == 2 and channels // groups < 3:
        groups = 1
    if w.elements // groups >= 3:
        w.set(f"{w.made_of(f'nn.GroupNorm({groups}, {channels})')}(x)")


def gated(w: Writer) -> None:
    width, inner = w.shape[-1], w.size()
    act = w.choice("F.silu", "F.gelu", "torch.sigmoid")
    kind = w.choice("two", "packed", "glu")
    if kind == "two":
        product = f"{act}({w.linear(width, inner)}(x)) * {w.linear(width, inner)}(x)"
    elif kind == "packed":
        gate, up = w.name(), w.name() + "u"
        w.lines.append(f"{gate}, {up} = {w.linear(width, 2 * inner)}(x).chunk(2, -1)")
        product = f"{act}({gate}) * {up}"
    else:
        product = f"F.glu({w.linear(width, 2 * inner)}(x))"
    w.set(f"{w.linear(inner, width)}({product})")


def attention(w: Writer) -> None:
    """Multi-head attention over dimension 1 of three."""
    if len(w.shape) != 3:
        return
    width = w.shape[-1]
    groups, repeat, head = w.choice(1, 2, 3, 4), w.choice(1, 1, 2, 3), w.choice(2, 3, 4)
    heads = groups * repeat
    shaped = "{}.unflatten(-1, ({}, {})).transpose(1, 2)"
    q, k, v = (w.name() + s for s in "qkv")
    if repeat == 1 and w.yes():
        packed = w.linear(width, 3 * heads * head)
        if w.yes():
            w.lines.append(f"{q}, {k}, {v} = {packed}(x).chunk(3, -1)")
            w.lines += [f"{n} = {shaped.format(n, heads, head)}" for n in (q, k, v)]
        else:
            sizes, order = w.choice((f"3, {heads}", "2, 0, 3, 1, 4"), (f"{heads}, 3", "3, 0, 2, 1, 4"))
            w.lines.append(f"{q}, {k}, {v} = {packed}(x).unflatten(-1, ({sizes}, {head})).permute({order})")
    else:
        w.lines.append(f"{q} = {shaped.format(w.linear(width, heads * head) + '(x)', heads, head)}")
        w.lines += [f"{n} = {shaped.format(w.linear(width, groups * head) + '(x)', groups, head)}" for n in (k, v)]
    mask = f"torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril({w.choice(0, 1)})"
    if w.yes(0.35):
        if repeat > 1:
            w.lines += [f"{n} = {n}.repeat_interleave({repeat}, 1)" for n in (k, v)]
        scores = f"{q} @ {k}.transpose(-1, -2) / {head}**0.5"
        masked = w.choice(scores, f"({scores}).masked_fill(~{mask}, -1e4)", f"30 * torch.tanh(({scores}) / 30)")
        mixed = f"torch.softmax({masked}, -1) @ {v}"
    else:
        options = [w.choice("", ", is_causal=True", f", attn_mask={mask}")] + [", enable_gqa=True"] * (repeat > 1)
        mixed = f"F.scaled_dot_product_attention({q}, {k}, {v}{''.join(options)})"
    merged = w.choice("({}).transpose(1, 2).flatten(2)", "({}).transpose(1, 2).reshape(*x.shape[:2], -1)")
    w.set(f"{w.linear(heads * head, width)}({merged.format(mixed)})")


def unflatten(w: Writer) -> None:
    d = w.dim()
    divisors = [n for n in range(2, w.shape[d]) if w.shape[d] % n == 0]
    if divisors and len(w.shape) < 5:
        outer = w.rng.choice(divisors)
        inner = w.shape[d] // outer
        w.set(f"x.unflatten({d}, ({outer}, {inner}))", [*w.shape[:d], outer, inner, *w.shape[d + 1 :]])


def flatten(w: Writer) -> None:
    if len(w.shape) > 2:
        d = w.rng.randrange(1, len(w.shape) - 1)
        w.set(f"x.flatten({d}, {d + 1})", [*w.shape[:d], w.shape[d] * w.shape[d + 1], *w.shape[d + 2 :]])


def reshape(w: Writer) -> None:
    """Another factorisation of all elements of a sample; it may cross the one before."""
    rest, shape = w.elements, []
    while rest > 1 and len(shape) < 3:
        part = w.rng.choice([n for n in range(2, rest + 1) if rest % n == 0])
        shape.append(part)
        rest //= part
    shape += [rest] if rest > 1 or not shape else []
    w.set(f"x.{w.choice('reshape', 'contiguous().view')}(-1, {', '.join(map(str, shape))})", [w.shape[0], *shape])


def transpose(w: Writer) -> None:
    if len(w.shape) > 2:
        a, b = w.rng.sample(range(1, len(w.shape)), 2)
        shape = list(w.shape)
        shape[a], shape[b] = shape[b], shape[a]
        w.set(f"x.transpose({a}, {b})", shape)


def permute(w: Writer) -> None:
    order = [0, *w.rng.sample(range(1, len(w.shape)), len(w.shape) - 1)]
    w.set(f"x.permute({order})", [w.shape[d] for d in order])


def pieces(w: Writer) -> None:
    """Cut a dimension and put the pieces together in another way."""
    d = w.dim()
    size = w.shape[d]
    parts = w.name()
    divisors = [n for n in (2, 3) if size % n == 0 and size > n]
    if divisors and w.yes(0.7):
        n = w.rng.choice(divisors)
        w.lines.append(f"{parts} = x.chunk({n}, {d})")
        joined = w.choice(
            f"torch.cat({parts}[::-1], {d})", f"{parts}[0] * {parts}[1].tanh()", f"torch.stack({parts}, {d})",
            f"torch.cat([{parts}[1], -{parts}[0]], {d})",
        )  # fmt: skip
        piece = [*w.shape[:d], size // n, *w.shape[d + 1 :]]
        if "stack" in joined:
            piece.insert(d, n)
        elif "cat" in joined:
            piece[d] = size if "::" in joined else 2 * size // n
        w.set(joined, piece)
    elif size > 2:
        first = w.rng.randrange(1, size)
        w.lines.append(f"{parts} = x.split([{first}, {size - first}], {d})")
        w.set(f"torch.cat([{parts}[1], {parts}[0]], {d})")


def around(w: Writer) -> None:
    """Rolled, flipped, padded, cut or accumulated along a dimension."""
    d = w.dim()
    size = w.shape[d]
    kind = w.choice("roll", "flip", "pad", "slice", "step", "cumsum", "tril", "select")
    if kind in ("roll", "flip", "cumsum"):
        w.set({"roll": f"x.roll({w.choice(1, -1, 2)}, {d})", "flip": f"x.flip({d})", "cumsum": f"x.cumsum({d})"}[kind])
    elif kind == "pad" and size < 10:
        before, after = w.choice((1, 0), (0, 1), (1, 1), (0, 2))
        pads = [0, 0] * (len(w.shape) - 1 - d) + [before, after]
        w.set(f"F.pad(x, {pads})", [*w.shape[:d], size + before + after, *w.shape[d + 1 :]])
    elif kind == "slice" and size > 2:
        start = w.choice(0, 1, size // 2)
        w.set(f"x.narrow({d}, {start}, {size - start})", [*w.shape[:d], size - start, *w.shape[d + 1 :]])
    elif kind == "step" and size % 2 == 0 and size > 2:
        index = ", ".join([":"] * d + [f"{w.choice(0, 1)}::2"])
        w.set(f"x[{index}]", [*w.shape[:d], size // 2, *w.shape[d + 1 :]])
    elif kind == "tril" and len(w.shape) > 2:
        w.set("x.tril()")
    elif kind == "select" and len(w.shape) > 2:
        w.set(f"x.select({d}, {w.rng.randrange(size)})", [*w.shape[:d], *w.shape[d + 1 :]])


def reduction(w: Writer) -> None:
    """A reduction that drops a dimension, or whose result meets the operand again."""
    dims = sorted(w.rng.sample(range(1, len(w.shape)), w.rng.randint(1, min(2, len(w.shape) - 1))))
    over = dims[0] if len(dims) == 1 and w.yes() else dims
    name = w.choice("mean", "sum", "amax", "logsumexp")
    if len(w.shape) - len(dims) > 1 and w.yes(0.4):
        kept = [size for d, size in enumerate(w.shape) if d not in dims]
        w.set(f"x.{name}({over})", kept)
    else:
        join = w.choice("x - {}", "x + {}", "x * torch.sigmoid({})")
        w.set(join.format(f"x.{name}({over}, keepdim=True)"))


def softmax(w: Writer) -> None:
    w.set(w.choice(f"x.softmax({w.dim()})", f"x.log_softmax({w.dim()})", f"x.softmax({w.dim()}) * x"))


def einsum(w: Writer) -> None:
    """A product with a parameter over some dimension, in letters; or with itself."""
    letters = "bijkl"[: len(w.shape)]
    d = w.dim()
    if len(w.shape) == 3 and w.yes(0.3) and w.shape[1] * w.shape[1] <= MOST_ELEMENTS:
        w.set("torch.einsum('bij,bkj->bik', x, x)", [w.shape[0], w.shape[1], w.shape[1]])
        return
    size = w.size()
    result = letters.replace(letters[d], "o")
    shape = [*w.shape[:d], size, *w.shape[d + 1 :]]
    if w.yes(0.3) and len(w.shape) > 2:  # per place of another dimension its own product
        other = w.rng.choice([n for n in range(1, len(w.shape)) if n != d])
        weight, sizes = f"{letters[other]}{letters[d]}o", (w.shape[other], w.shape[d], size)
    else:
        weight, sizes = w.choice((f"{letters[d]}o", (w.shape[d], size)), (f"o{letters[d]}", (size, w.shape[d])))
    w.set(f"torch.einsum('{letters},{weight}->{result}', x, {w.parameter(*sizes)})", shape)


def scale(w: Writer) -> None:
    """A parameter that broadcasts, added or multiplied."""
    kept = w.rng.randint(1, len(w.shape) - 1)
    sizes = [size if w.yes(0.8) else 1 for size in w.shape[len(w.shape) - kept :]]
    w.set(f"x {w.choice('+', '*')} {w.parameter(*sizes)}")


def convolution(w: Writer) -> None:
    if len(w.shape) not in (3, 4):
        return
    channels, places = w.shape[1], w.shape[2:]
    kernel = w.choice(1, 2, 3)
    tiles = all(size % kernel == 0 for size in places) and w.yes()
    groups = w.rng.choice([g for g in (1, 2, 3, channels) if channels % g == 0])
    out = groups * w.choice(1, 2, 3)
    if not tiles and kernel == 2:
        kernel = 3
    options = f"stride={kernel}" if tiles else f"padding={kernel // 2}"
    bias = "" if w.yes() else ", bias=False"
    made = w.made_of(f"nn.Conv{len(places)}d({channels}, {out}, {kernel}, groups={groups}, {options}{bias})")
    w.set(f"{made}(x)", [w.shape[0], out, *(size // kernel if tiles else size for size in places)])


def merged_batch(w: Writer) -> None:
    """The batch and the next dimension as one, for a product."""
    if len(w.shape) > 2:
        size = w.size()
        product = f"{w.linear(w.shape[-1], size)}(x.flatten(0, 1))"
        w.set(f"{product}.unflatten(0, (-1, {w.shape[1]}))", [*w.shape[:-1], size])


def over_batch(w: Writer) -> None:
    """Samples that depend on each other."""
    w.set(
        w.choice("x - x.mean(0, keepdim=True)", "x * x.softmax(0)", "x + x.roll(1, 0)", "x / (1 + x.square().sum(0))")
    )


def attended_batch(w: Writer) -> None:
    """The sequence first, as `nn.MultiheadAttention` has it, and back."""
    if len(w.shape) == 3:
        size = w.size()
        w.set(f"{w.linear(w.shape[-1], size)}(x.transpose(0, 1)).transpose(0, 1)", [*w.shape[:-1], size])


def expanded(w: Writer) -> None:
    if len(w.shape) < 4 and w.elements * 2 <= MOST_ELEMENTS:
        d, n = w.dim(), w.choice(2, 3)
        shape = [*w.shape[:d], n, *w.shape[d:]]
        repeat = [1] * len(w.shape)
        repeat[d] = n
        if w.yes():
            sizes = [-1 if k != d else n for k in range(len(shape))]
            w.set(f"x.unsqueeze({d}).expand({sizes}) * {w.parameter(n, *([1] * (len(shape) - d - 1)))}", shape)
        else:
            w.set(f"x.repeat({repeat})", [*w.shape[:d], n * w.shape[d], *w.shape[d + 1 :]])


ANY: tuple[Step, ...] = (
    linear, linear, linear, activation, norm, norm, group_norm, gated, gated, attention, attention, unflatten, flatten,
    reshape, transpose, permute, pieces, pieces, around, around, reduction, reduction, softmax, einsum, einsum, scale,
    convolution, merged_batch, over_batch, attended_batch, expanded,
)  # fmt: skip
SAME_SHAPE: tuple[Step, ...] = (norm, gated, attention, attention, activation, scale)
