"""Sample calls of views, pieces, created and indexed tensors."""

import torch
from rule_samples import Arguments, Draw, along_dim, one_tensor, sampler

aten = torch.ops.aten


def _factorised(d: Draw) -> tuple[list[int], list[int]]:
    """Two shapes of one tensor: groupings of one list of sizes, or unrelated where the draw says so."""
    sizes = [d.choice(1, 2, 2, 3, 4) for _ in range(4)]

    def grouped() -> list[int]:
        shape: list[int] = []
        for size in sizes:
            if shape and d.yes():
                shape[-1] *= size
            else:
                shape.append(size)
        return shape

    return d.choice((grouped(), grouped()), (grouped(), grouped()), ([4, 3, 2], [2, 6, 2]), ([2, 4, 6], [2, 6, 4]))


@sampler(aten.reshape.default, aten._unsafe_view.default, aten.view.default)
def _(d: Draw) -> Arguments:
    source, target = _factorised(d)
    if d.yes():
        target[d.rng.randrange(len(target))] = -1
    return (d.real(*source), target)


@sampler(aten.flatten.using_ints)
def _(d: Draw) -> Arguments:
    shape = d.sizes(2, 4)
    start = d.rng.randrange(len(shape))
    return (d.real(*shape), start, d.rng.randrange(start, len(shape)))


@sampler(aten.unflatten.int)
def _(d: Draw) -> Arguments:
    shape, at, parts = d.sizes(1, 3), 0, d.sizes(2)
    at = d.rng.randrange(len(shape))
    shape[at] = parts[0] * parts[1]
    return (d.real(*shape), at, parts)


sampler(aten.squeeze.default)(one_tensor())
sampler(aten.t.default)(one_tensor(low=0, high=2))
sampler(aten.numpy_T.default)(one_tensor(low=2, high=2))
sampler(aten.mT.default)(one_tensor(low=2, high=4))
sampler(aten.adjoint.default)(one_tensor(low=2, high=4))
sampler(aten.squeeze.dim)(along_dim())
sampler(aten.flip.default)(lambda d: (d.real(*d.sizes(3)), d.some_dims(3)))
sampler(aten.squeeze.dims)(lambda d: (d.real(*d.sizes(3)), d.some_dims(3)))


@sampler(aten.unsqueeze.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(0, 3)
    return (d.real(*shape), d.dim(len(shape) + 1))


@sampler(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 4)
    return (d.real(*shape), d.dim(len(shape)), d.dim(len(shape)))


@sampler(aten.permute.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(2, 4)
    return (d.real(*shape), [n - len(shape) if d.yes() else n for n in d.rng.sample(range(len(shape)), len(shape))])


@sampler(aten.movedim.int)
def _(d: Draw) -> Arguments:
    return (d.real(*d.sizes(4)), d.dim(4), d.dim(4))


@sampler(aten.movedim.intlist)
def _(d: Draw) -> Arguments:
    count = d.rng.randint(1, 4)
    return (d.real(*d.sizes(4)), d.rng.sample(range(4), count), d.rng.sample(range(-4, 0), count))


@sampler(aten.expand.default, aten.broadcast_to.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 4)
    source = d.broadcastable(shape)
    return (d.real(*source), shape)


@sampler(aten.expand_as.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 4)
    return (d.real(*d.broadcastable(shape)), d.real(*shape))


@sampler(aten.repeat.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 2)
    return (d.real(*shape), d.sizes(len(shape), len(shape) + 1))


@sampler(aten.repeat_interleave.self_int)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    return (d.real(*shape), d.size(), d.choice(None, d.dim(len(shape)), d.dim(len(shape))))


@sampler(aten.roll.default)
def _(d: Draw) -> Arguments:
    over = d.some_dims(3)
    return (d.real(*d.sizes(3)), [d.choice(1, -1, 2) for _ in over], over) if d.yes() else (d.real(*d.sizes(2)), [1])


sampler(aten.tril.default, aten.triu.default)(lambda d: (d.real(*d.sizes(2, 4)), d.choice(0, 1, -1)))


@sampler(aten.constant_pad_nd.default)
def _(d: Draw) -> Arguments:
    shape = [d.split() for _ in range(3)]
    return (d.real(*shape), [d.choice(0, 1, 2, -1) for _ in range(2 * d.rng.randint(1, 3))], d.choice(0, 0.0, 1.5))


@sampler(aten.slice.Tensor)
def _(d: Draw) -> Arguments:
    shape = d.sizes(3)
    at, pieces, e = d.rng.randrange(3), d.choice(1, 2, 3), d.split()
    shape[at] = pieces * e
    index = d.rng.randrange(pieces)
    bounds = d.choice(
        (index * e, (index + 1) * e),
        (index * e, (index + 1) * e),
        (index, None, pieces),
        (1, None),
        (None, 2**63 - 1),
        (-e, None),
        (0, -1),
        (0, None, 2),
        (),
    )
    return (d.real(*shape), d.choice(at, at - 3), *bounds)


@sampler(aten.narrow.default)
def _(d: Draw) -> Arguments:
    pieces, e = d.choice(1, 2, 3), d.split()
    return (d.real(d.size(), pieces * e), 1, d.choice(-e, d.rng.randrange(pieces) * e), d.choice(e, e - 1))


@sampler(aten.diff.default)
def _(d: Draw) -> Arguments:
    shape, at = d.sizes(3), d.rng.randrange(3)
    shape[at] = d.choice(3, 4, 6)
    edge = [d.choice(1, 2) if n == at else size for n, size in enumerate(shape)]
    edges = d.choice((), (d.real(*edge),), (None, d.real(*edge)))
    return (d.real(*shape), d.choice(1, 2), d.choice(at, at - 3), *edges)


@sampler(aten.select.int)
def _(d: Draw) -> Arguments:
    shape = d.sizes(1, 3)
    at = d.rng.randrange(len(shape))
    return (d.real(*shape), at, d.dim(shape[at]))


@sampler(aten.cat.default, aten.concat.default)
def _(d: Draw) -> Arguments:
    shape = [d.split() for _ in range(3)]
    at, equal = d.rng.randrange(3), d.yes()
    pieces = [[size if n != at or equal else d.size() for n, size in enumerate(shape)] for _ in range(d.choice(2, 3))]
    return ([d.real(*piece) for piece in pieces], d.choice(at, at - 3))


@sampler(aten.stack.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(2)
    return ([d.real(*shape) for _ in range(d.choice(1, 2, 3))], d.dim(3))


@sampler(aten.glu.default)
def _(d: Draw) -> Arguments:
    shape, at = d.sizes(3), d.rng.randrange(3)
    shape[at] *= 2
    return (d.real(*shape), at)


@sampler(aten.full.default)
def _(d: Draw) -> Arguments:
    return (d.sizes(1, 3), 1.5), {"dtype": torch.float64}


sampler(aten.zeros.default, aten.ones.default)(lambda d: (d.sizes(1, 3),))


def _like_or_not(d: Draw) -> tuple[torch.Tensor, list[int]]:
    """A tensor, and its shape or another."""
    shape = d.sizes(1, 3)
    return d.real(*shape) if d.yes() else d.real(*d.sizes(1, 2)), shape


sampler(aten.new_zeros.default, aten.new_ones.default)(_like_or_not)
sampler(aten.new_full.default)(lambda d: (*_like_or_not(d), -1.0))
sampler(aten.zeros_like.default, aten.ones_like.default)(one_tensor())
sampler(aten.full_like.default)(one_tensor(-1.0))
sampler(aten.arange.default)(lambda d: (d.split(),))
sampler(aten.arange.start)(lambda d: (1, 1 + d.split()))
sampler(aten.arange.start_step)(lambda d: (0, 2 * d.split(), 2))
sampler(aten.linspace.default)(lambda d: (0.0, 1.0, d.split()))
sampler(aten.eye.default)(lambda d: (d.split(),))
sampler(aten.eye.m)(lambda d: (d.split(), d.split()))
sampler(aten.scalar_tensor.default)(lambda d: (2.0,))


@sampler(aten.index_select.default)
def _(d: Draw) -> Arguments:
    shape = d.sizes(3)
    at = d.rng.randrange(3)
    return (d.real(*shape), d.choice(at, at - 3), d.ids(shape[at], d.split()))


@sampler(aten.index.Tensor)
def _(d: Draw) -> Arguments:
    shape, block = d.sizes(3), d.sizes(1, 2)
    places = d.choice([0], [1], [2], [0, 1], [1, 2], [0, 2])
    indices = [d.ids(shape[n], *d.broadcastable(block)) if n in places else None for n in range(max(places) + 1)]
    if d.rng.random() < 0.1:
        indices = [torch.ones(shape[0], dtype=torch.bool)]
    return (d.real(*shape), indices)


@sampler(aten.gather.default)
def _(d: Draw) -> Arguments:
    shape = [d.split() for _ in range(3)]
    at = d.rng.randrange(3)
    picked = [size - d.choice(0, 0, 0, 1) for size in shape]
    picked[at] = d.split()
    return (d.real(*shape), at, d.ids(shape[at], *picked))


@sampler(aten.index_add.default)
def _(d: Draw) -> Arguments:
    shape, at, rows = d.sizes(1, 3), 0, d.split()
    at = d.rng.randrange(len(shape))
    source = [rows if n == at else size for n, size in enumerate(shape)]
    return (d.real(*shape), at, d.ids(shape[at], rows), d.real(*source)), d.choice({}, {"alpha": 0.5})


def _scatter(d: Draw) -> tuple[list[int], int, torch.Tensor]:
    """Shape, dimension and an index without duplicates."""
    shape = [d.split() for _ in range(3)]
    at = d.rng.randrange(3)
    index = torch.rand(shape, generator=d.torch).argsort(at)
    return shape, at, index.narrow(at, 0, d.choice(2, shape[at]))


@sampler(aten.scatter_add.default)
def _(d: Draw) -> Arguments:
    shape, at, index = _scatter(d)
    index = index if d.yes() else d.ids(shape[at], *index.shape)
    return (d.real(*shape), at, index, d.real(*index.shape))


@sampler(aten.scatter.src)
def _(d: Draw) -> Arguments:
    shape, at, index = _scatter(d)
    return (d.real(*shape), at, index, d.real(*index.shape))


@sampler(aten.scatter.value)
def _(d: Draw) -> Arguments:
    shape, at, index = _scatter(d)
    return (d.real(*shape), at, index, d.choice(0.0, 1.5))
