"""Sample calls of products, reductions, attention, norms, look-ups, losses and random operators."""

from typing import Any

import torch
from rule_samples import Arguments, Draw, Sampler, along_dim, constant, one_tensor, sampler

from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.operators import OVER_MICRO_BATCHES
from autopar.rules.routed import ORDER, PRODUCT, ROWS, TAKE, UNTAKE

aten = torch.ops.aten


@sampler(aten.linear.default)
def _(d: Draw) -> Arguments:
    i, o = d.sizes(2)
    x, weight = d.real(*d.sizes(0, 2), i), d.real(o, i)
    return (x, weight, d.real(o)) if d.yes() else (x, weight)


@sampler(aten.mm.default)
def _(d: Draw) -> Arguments:
    m, k, n = d.sizes(3)
    return (d.real(m, k), d.real(k, n))


@sampler(aten.bmm.default)
def _(d: Draw) -> Arguments:
    b, m, k, n = d.sizes(4)
    return (d.real(b, m, k), d.real(b, k, n))


@sampler(aten.mv.default)
def _(d: Draw) -> Arguments:
    m, k = d.sizes(2)
    return (d.real(m, k), d.real(k))


@sampler(aten.dot.default)
def _(d: Draw) -> Arguments:
    k = d.split()
    return (d.real(k), d.real(k))


@sampler(aten.outer.default)
def _(d: Draw) -> Arguments:
    return (d.real(d.size()), d.real(d.size()))


@sampler(aten.matmul.default)
def _(d: Draw) -> Arguments:
    k, batch = d.size(), d.sizes(0, 2)
    left = [k] if d.yes() and d.yes() else [*d.broadcastable(batch), d.size(), k]
    right = [k] if d.yes() and d.yes() else [*d.broadcastable(batch), k, d.size()]
    return (d.real(*left), d.real(*right))


def _scales(d: Draw) -> dict[str, Any]:
    return {"beta": d.choice(1, 0.5), "alpha": d.choice(1, -2.0)} if d.yes() else {}


@sampler(aten.addmm.default)
def _(d: Draw) -> Arguments:
    m, k, n = d.sizes(3)
    addend = d.choice([n], [m, n], [m, 1], [1, n], [1], [])
    return (d.real(*addend), d.real(m, k), d.real(k, n)), _scales(d)


@sampler(GROUPED_MM)
def _(d: Draw) -> Arguments:
    t, k, n = d.split(), d.split(), d.split()
    ends = torch.tensor(sorted(d.choice(*range(t + 1)) for _ in range(d.choice(1, 2, 4))), dtype=torch.int32)
    return (d.real(t, k), d.real(len(ends), k, n), ends)


@sampler(OVER_MICRO_BATCHES)
def _(d: Draw) -> Arguments:
    return (d.real(*d.sizes(0, 2)), d.real())


@sampler(ORDER)
def _(d: Draw) -> Arguments:
    return (d.ids(4, d.split(), d.choice(1, 2)),)


@sampler(ROWS)
def _(d: Draw) -> Arguments:
    t, k = d.split(), d.choice(1, 2)
    return (d.real(t, *d.sizes(0, 2)), torch.randperm(t * k), k)


@sampler(TAKE, UNTAKE)
def _(d: Draw) -> Arguments:
    t, k = d.split(), d.choice(1, 2)
    return (d.real(t * k, *d.sizes(0, 2)), torch.randperm(t * k), k)


@sampler(PRODUCT)
def _(d: Draw) -> Arguments:
    t, j, experts = d.split(), d.choice(1, 2), d.choice(1, 2, 4)
    expert = d.ids(experts, t * j).sort().values
    k, n = d.split(), d.split()
    return (d.real(t * j, k), d.real(experts, k, n), expert, j)


@sampler(aten.baddbmm.default)
def _(d: Draw) -> Arguments:
    b, m, k, n = d.sizes(4)
    addend = d.choice([b, m, n], [m, n], [b, 1, n], [n], [1, m, 1])
    return (d.real(*addend), d.real(b, m, k), d.real(b, k, n)), _scales(d)


@sampler(aten.einsum.default)
def _(d: Draw) -> Arguments:
    equations = "bij,bjk->bik bqhe,bkhe->bhqk ij,j->i i,j->ij ij->ji ij,jk,kl->il ...i,oi->...o ii->i ij,jk i,i-> ij->i"
    equation = d.choice(*equations.split())
    sizes = {letter: d.size() for letter in equation if letter.isalpha()}
    dots = d.sizes(2)

    def shape(term: str) -> list[int]:
        return (dots if "." in term else []) + [sizes[letter] for letter in term if letter.isalpha()]

    return (equation, [d.real(*shape(term)) for term in equation.split("->")[0].split(",")])


sampler(aten.sum.default, aten.mean.default, aten.prod.default, aten.max.default, aten.min.default)(one_tensor())
sampler(aten.any.default, aten.all.default)(lambda d: (d.mask(*d.sizes(1, 3)),))
sampler(aten.any.dim, aten.all.dim)(lambda d: (d.mask(*d.sizes(3)), d.dim(3), d.yes()))
sampler(aten.any.dims, aten.all.dims)(lambda d: (d.mask(*d.sizes(3)), d.some_dims(3), d.yes()))
sampler(aten.prod.dim_int)(lambda d: (d.real(*d.sizes(3)), d.dim(3), d.yes()))
sampler(aten.argmax.default, aten.argmin.default)(
    lambda d: (d.real(*d.sizes(3)), d.choice(None, d.dim(3), d.dim(3)), d.yes())
)


@sampler(aten.sum.dim_IntList, aten.mean.dim)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 4)
    over = d.choice(d.some_dims(len(shape)), d.some_dims(len(shape)), None, [])
    return (d.real(*shape), over, d.yes())


@sampler(aten.amax.default, aten.amin.default, aten.logsumexp.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 4)
    return (d.real(*shape), d.some_dims(len(shape)), d.yes())


@sampler(aten.var.correction, aten.std.correction)
def _(d: Draw) -> Arguments:
    keywords = {"correction": d.choice(0, 1), "keepdim": d.yes()}
    return (d.real(*[d.split() for _ in range(3)]), d.choice(None, d.some_dims(3))), keywords


sampler(aten.var.dim, aten.std.dim)(lambda d: (d.real(4, 2, 6), d.some_dims(3), d.yes(), d.yes()))
sampler(aten.linalg_vector_norm.default)(
    lambda d: (d.real(*d.sizes(3)), d.choice(1, 2, 3.0), d.choice(None, d.some_dims(3)), d.yes())
)
sampler(aten.norm.ScalarOpt_dim)(lambda d: (d.real(*d.sizes(3)), d.choice(None, 2), d.some_dims(3), d.yes()))
sampler(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)(along_dim())
sampler(aten.softmax.int, aten.log_softmax.int)(along_dim())
sampler(aten._softmax.default, aten._log_softmax.default)(along_dim(False))


def _attention(d: Draw, dropout: float = 0.0) -> Arguments:
    q, k, e, f, r = d.split(), d.split(), d.split(), d.split(), d.choice(1, 2, 3)
    batch, heads = d.sizes(0, 2), d.split()
    grouped = d.yes()
    causal = d.yes() and d.yes()
    query = d.real(*batch, heads * r if grouped else heads, q, e)
    key, value = d.real(*batch, heads, k, e), d.real(*batch, heads, k, f)
    mask: Any = None
    if not causal and d.yes():
        shape = d.choice([q, k], [1, k], [*[1 for _ in batch], 1, q, k], [*batch, query.shape[-3], q, k])
        mask = d.real(*shape)
        if d.yes():
            mask = d.mask(*shape)
            mask[..., 0] = True
    if len(batch) == 0 and grouped:
        grouped, query = False, query[:heads]
        mask = None
    keywords = {"enable_gqa": True} if grouped else {}
    return (query, key, value, mask, dropout, causal), keywords


sampler(aten.scaled_dot_product_attention.default)(_attention)


@sampler(aten.layer_norm.default)
def _(d: Draw) -> Arguments:
    shape = [*d.sizes(1, 2), d.split(), d.split()]
    last = shape[-d.choice(1, 2) :]
    affine = d.choice((d.real(*last), d.real(*last)), (None, None), (d.real(*last), None))
    return (d.real(*shape), last, *affine, 1e-5)


@sampler(aten.rms_norm.default)
def _(d: Draw) -> Arguments:
    shape = [*d.sizes(1, 2), d.split()]
    return (d.real(*shape), shape[-1:], d.choice(None, d.real(shape[-1])), 1e-6)


@sampler(aten.group_norm.default)
def _(d: Draw) -> Arguments:
    groups, width = d.split(), d.choice(1, 2)
    channels = groups * width
    affine = d.choice((d.real(channels), d.real(channels)), (None, None))
    return (d.real(d.split(), channels, *d.sizes(1, 2), 2), groups, *affine, 1e-5)


@sampler(aten.batch_norm.default)
def _(d: Draw) -> Arguments:
    c, training = d.split(), d.yes()
    statistics = (None, None) if training else (constant(d.real(c)), constant(d.real(c).exp()))
    affine = d.choice((d.real(c), d.real(c)), (None, None))
    return (d.real(d.split(), c, d.size()), *affine, *statistics, training, 0.1, 1e-5, False)


@sampler(aten.embedding.default)
def _(d: Draw) -> Arguments:
    v, width = d.split(), d.size()
    more = d.choice((), (), (1,), (-1, True))
    return (d.real(v, width), d.ids(v, *d.sizes(0, 2)), *more)


sampler(aten.one_hot.default)(lambda d: (d.ids(4, *d.sizes(1, 2)), d.choice(4, 6)))


def _classification(d: Draw) -> tuple[torch.Tensor, torch.Tensor, int]:
    v, n, rest = d.split(), d.split(), d.sizes(0, 2)
    logits, target = d.real(n, v, *rest), d.ids(v, n, *rest)
    if d.rng.random() < 0.2:
        logits, target = d.real(v), d.ids(v)
    else:
        target[0] = -100
    return logits, target, v


@sampler(aten.cross_entropy_loss.default)
def _(d: Draw) -> Arguments:
    logits, target, v = _classification(d)
    reduction, smoothing = d.choice(0, 1, 2, 2, 2), d.choice(0.0, 0.0, 0.1)
    if d.rng.random() < 0.2:
        target = torch.softmax(d.real(*logits.shape), min(1, logits.dim() - 1))
    return (logits, target, d.choice(None, None, constant(d.real(v).abs())), reduction, -100, smoothing)


@sampler(aten.nll_loss_nd.default)
def _(d: Draw) -> Arguments:
    logits, target, v = _classification(d)
    return (logits, target, d.choice(None, constant(d.real(v).abs())), d.choice(0, 1, 2), -100)


@sampler(aten.nll_loss.default)
def _(d: Draw) -> Arguments:
    n, v = d.split(), d.split()
    return (d.real(n, v), d.ids(v, n), None, d.choice(0, 1, 2), -100)


@sampler(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.l1_loss.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.real(*shape), d.real(*shape), d.choice(0, 1, 2))


@sampler(aten.soft_margin_loss.default, aten.kl_div.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.real(*shape), constant(d.real(*shape).abs() + 0.1), d.choice(0, 1, 2))


@sampler(aten.binary_cross_entropy.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    weight = d.choice(None, constant(d.real(*shape).abs()))
    return (d.real(*shape).sigmoid(), constant(d.real(*shape).sigmoid()), weight, d.choice(0, 1, 2))


@sampler(aten.binary_cross_entropy_with_logits.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    weights = [d.choice(None, constant(d.real(*d.broadcastable(shape)).abs())) for _ in range(2)]
    return (d.real(*shape), d.real(*shape).sigmoid(), *weights, d.choice(0, 1, 2))


@sampler(aten.dropout.default)
def _(d: Draw) -> Arguments:
    return (d.real(*d.sizes(1, 3)), *d.choice((0.5, True), (0.5, False), (0.0, True)))


sampler(aten.bernoulli.default)(lambda d: (d.real(*d.sizes(1, 3)).sigmoid(),))
sampler(aten.bernoulli.p)(one_tensor(0.5))
sampler(aten.rand_like.default, aten.randn_like.default)(one_tensor())
sampler(aten.alpha_dropout.default, aten.feature_dropout.default, aten.feature_alpha_dropout.default)(
    lambda d: (d.real(d.split(), d.split(), 2), 0.5, True)
)
sampler(aten.bernoulli.Tensor, aten.normal.Tensor_Tensor)(
    lambda d: (lambda p: (p, p.clone()))(d.real(*d.sizes(1, 3)).sigmoid())
)
sampler(aten.poisson.default)(lambda d: (d.real(*d.sizes(1, 3)).abs(),))
sampler(aten.exponential.default, aten.uniform.default, aten.normal_functional.default, aten.log_normal.default)(
    one_tensor()
)
sampler(aten.cauchy.default, aten.random.default)(one_tensor())
sampler(aten.geometric.default, aten.normal.Tensor_float)(one_tensor(0.5))
sampler(aten.normal.float_Tensor)(lambda d: (0.5, d.real(*d.sizes(1, 3)).abs()))
sampler(aten.random.to, aten.randint_like.default)(one_tensor(5))
sampler(getattr(aten.random, "from"), aten.randint_like.low_dtype)(one_tensor(1, 5))
sampler(aten.rand.default, aten.randn.default)(lambda d: (d.sizes(1, 3),))
sampler(aten.randint.default)(lambda d: (5, d.sizes(1, 3)))
sampler(aten.randint.low)(lambda d: (1, 5, d.sizes(1, 3)))
sampler(aten.randperm.default)(lambda d: (d.split(),))
sampler(aten.multinomial.default)(lambda d: (d.real(d.split(), 4).abs(), 2))


def _convolution(dims: int) -> Sampler:
    def draw(d: Draw) -> Arguments:
        n, i, o, groups = d.split(), d.choice(2, 4), d.choice(2, 4), d.choice(1, 1, 2)
        kernel = [d.choice(1, 2, 3) for _ in range(dims)]
        bias = d.real(groups * o) if d.yes() else None
        weight = d.real(groups * o, i, *kernel)
        if d.yes():  # patches
            return (
                d.real(n, groups * i, *[2 * k for k in kernel]),
                weight,
                bias,
                kernel,
                [0] * dims,
                [1] * dims,
                groups,
            )
        return (d.real(n, groups * i, *[4] * dims), weight, bias, [1] * dims, [1] * dims, [1] * dims, groups)

    return draw


def _padded_by_name(dims: int) -> Sampler:
    def draw(d: Draw) -> Arguments:
        n, i, o, groups, width = d.split(), 2, d.choice(2, 4), d.choice(1, 2), d.choice(2, 3)
        bias = d.real(groups * o) if d.yes() else None
        size = [width * d.choice(1, 2)] * dims
        stride, padding = d.choice((1, "same"), (1, "valid"), (width, "valid"))
        weight = d.real(groups * o, i, *[width] * dims)
        return (d.real(n, groups * i, *size), weight, bias, [stride] * dims, padding, [1] * dims, groups)

    return draw


for _dims, _target in enumerate((aten.conv1d, aten.conv2d, aten.conv3d), 1):
    sampler(_target.default)(_convolution(_dims))
    sampler(_target.padding)(_padded_by_name(_dims))
