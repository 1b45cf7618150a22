"""Sample calls of operators on images, of Fourier transforms, and of operators on matrices."""

import torch
from rule_samples import Arguments, Draw, Sampler, sampler

from autopar.rules.families.fourier import MANY_DIMS, ONE_DIM, SHIFTS, TWO_DIMS
from autopar.rules.operators import output_of

aten = torch.ops.aten


def image(d: Draw, places: int, size: int = 4) -> torch.Tensor:
    return d.real(d.split(), d.split(), *[size] * places)


def _pooled(places: int, *more: object) -> Sampler:
    return lambda d: (image(d, places), [2] * places, [d.choice(1, 2)] * places, *more)


def _to_size(places: int, *more: object) -> Sampler:
    return lambda d: (image(d, places), [d.choice(3, 6) for _ in range(places)], *more)


for _n, (_max, _avg, _with_indices, _adaptive_max, _adaptive_avg, _nearest, _exact) in enumerate(
    (
        (aten.max_pool1d, aten.avg_pool1d, aten.max_pool1d_with_indices, aten.adaptive_max_pool1d,
         aten.adaptive_avg_pool1d, aten.upsample_nearest1d, aten._upsample_nearest_exact1d),
        (aten.max_pool2d, aten.avg_pool2d, aten.max_pool2d_with_indices, aten.adaptive_max_pool2d,
         aten.adaptive_avg_pool2d, aten.upsample_nearest2d, aten._upsample_nearest_exact2d),
        (aten.max_pool3d, aten.avg_pool3d, aten.max_pool3d_with_indices, aten.adaptive_max_pool3d,
         aten.adaptive_avg_pool3d, aten.upsample_nearest3d, aten._upsample_nearest_exact3d),
    ),
    1,
):  # fmt: skip
    sampler(_max.default, _avg.default)(_pooled(_n))
    sampler(*(output_of(_with_indices.default, k) for k in (0, 1)))(_pooled(_n))
    sampler(*(output_of(_adaptive_max.default, k) for k in (0, 1)), _adaptive_avg.default)(_to_size(_n))
    sampler(_nearest.default, _exact.default)(_to_size(_n))
    sampler(_nearest.vec, _exact.vec)(_to_size(_n, None))
for _n, _packet in (
    (1, aten.upsample_linear1d),
    (2, aten.upsample_bilinear2d),
    (2, aten.upsample_bicubic2d),
    (2, aten._upsample_bilinear2d_aa),
    (2, aten._upsample_bicubic2d_aa),
    (3, aten.upsample_trilinear3d),
):
    sampler(_packet.default)(_to_size(_n, True))
    sampler(_packet.vec)(_to_size(_n, False, None))
for _n, _packets in enumerate(
    (
        (aten.reflection_pad1d, aten.replication_pad1d),
        (aten.reflection_pad2d, aten.replication_pad2d),
        (aten.reflection_pad3d, aten.replication_pad3d),
    ),
    1,
):
    for _packet in _packets:
        sampler(_packet.default)(lambda d, n=_n: (image(d, n), [1, 2] * n))  # type: ignore[misc]


@sampler(aten.pixel_shuffle.default)
def _(d: Draw) -> Arguments:
    return (d.real(d.split(), d.choice(8, 16), d.choice(2, 4), d.choice(3, 6)), 2)


sampler(aten.pixel_unshuffle.default)(lambda d: (image(d, 2, d.choice(4, 8)), 2))
sampler(aten.channel_shuffle.default)(lambda d: (d.real(d.split(), 4, 2, 3), 2))


@sampler(aten.max_unpool2d.default)
def _(d: Draw) -> Arguments:
    picked, indices = torch.nn.functional.max_pool2d(image(d, 2), 2, return_indices=True)
    return (picked, indices, [4, 4])


@sampler(aten.max_unpool3d.default)
def _(d: Draw) -> Arguments:
    picked, indices = torch.nn.functional.max_pool3d(image(d, 3), 2, return_indices=True)
    return (picked, indices, [4, 4, 4], [2, 2, 2], [0, 0, 0])


@sampler(aten.im2col.default)
def _(d: Draw) -> Arguments:
    return (image(d, 2), [2, 2], [1, 1], [d.choice(0, 1)] * 2, [d.choice(1, 2)] * 2)


@sampler(aten.col2im.default)
def _(d: Draw) -> Arguments:
    return (d.real(d.split(), 4 * d.split(), 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])


@sampler(aten.grid_sampler.default)
def _(d: Draw) -> Arguments:
    places = d.choice(2, 3)
    points = d.real(1, *[d.split() for _ in range(places)], places)
    x = image(d, places)
    return (x, points.expand(x.shape[0], *points.shape[1:]).contiguous() * 0.4, 0, d.choice(0, 1), d.yes())


@sampler(aten.grid_sampler_2d.default)
def _(d: Draw) -> Arguments:
    x = image(d, 2)
    return (x, d.real(x.shape[0], d.split(), d.split(), 2) * 0.4, 0, 0, d.yes())


@sampler(aten.grid_sampler_3d.default)
def _(d: Draw) -> Arguments:
    x = image(d, 3)
    return (x, d.real(x.shape[0], d.split(), d.split(), d.split(), 3) * 0.4, 0, 0, d.yes())


@sampler(aten.affine_grid_generator.default)
def _(d: Draw) -> Arguments:
    n = d.split()
    return (d.real(n, 2, 3), [n, 3, 4, 5], d.yes())


def _transposed(places: int) -> Sampler:
    def draw(d: Draw) -> Arguments:
        groups, i, o, width = d.choice(1, 2, 4), d.choice(2, 4), d.choice(2, 4), d.choice(2, 3)
        x, weight = d.real(d.split(), groups * i, *[d.choice(2, 4)] * places), d.real(groups * i, o, *[width] * places)
        bias = d.real(groups * o) if d.yes() else None
        if d.yes():  # places of the kernel do not overlap
            return (x, weight, bias, [width] * places, [0] * places, [0] * places, groups)
        return (x, weight, bias, [2] * places, [1] * places, [d.choice(0, 1)] * places, groups, [1] * places)

    return draw


sampler(aten.conv_transpose1d.default)(_transposed(1))
sampler(aten.conv_transpose2d.input)(_transposed(2))
sampler(aten.conv_transpose3d.input)(_transposed(3))


def _complex(d: Draw, *shape: int) -> torch.Tensor:
    return torch.complex(d.real(*shape), d.real(*shape))


def _is_of_real(packet: object) -> bool:
    return any(f"fft_{name}" in str(packet) for name in ("rfft", "ihfft"))


for _packet in (*ONE_DIM, *TWO_DIMS, *MANY_DIMS, *SHIFTS):
    _draw = Draw.real if _is_of_real(_packet) else _complex

    def _sample(d: Draw, packet: object = _packet, draw: object = _draw) -> Arguments:
        x = draw(d, d.split(), d.split(), 3, d.split())  # type: ignore[operator]
        if packet in SHIFTS:
            return (x, d.some_dims(4))
        if packet in ONE_DIM:
            return (x, d.choice(None, 5), d.dim(4))
        return (x, None, d.choice([-2, -1], [0, 2], [1, 3]))

    sampler(_packet.default)(_sample)


@sampler(aten.stft.default)
def _(d: Draw) -> Arguments:
    return ((d.real(d.choice(4, 6), 16), 8, 4, 8, d.real(8).abs()), {"return_complex": True})


sampler(aten.view_as_real.default)(lambda d: (_complex(d, *d.sizes(1, 3)),))
sampler(aten.view_as_complex.default)(lambda d: (d.real(*d.sizes(1, 3), 2),))
sampler(aten.real.default, aten.imag.default, aten._conj.default, aten.conj.default, aten.angle.default)(
    lambda d: (_complex(d, *d.sizes(1, 3)),)
)
sampler(aten.resolve_conj.default)(lambda d: (_complex(d, *d.sizes(1, 3)),))


@sampler(aten.linalg_inv.default, aten.inverse.default, output_of(aten.linalg_inv_ex.default, 0))
@sampler(aten.linalg_matrix_exp.default, aten.linalg_det.default)
def _(d: Draw) -> Arguments:
    return (d.real(d.choice(4, 6), 3, 3) + 4 * torch.eye(3, dtype=torch.float64),)


@sampler(aten.linalg_cholesky.default)
def _(d: Draw) -> Arguments:
    x = d.real(d.choice(4, 6), 3, 3)
    return (x @ x.mT + torch.eye(3, dtype=torch.float64),)


@sampler(aten.cdist.default)
def _(d: Draw) -> Arguments:
    b, m, k, n = d.split(), d.split(), d.size(), d.split()
    return (d.real(b, m, k), d.real(b, n, k))


@sampler(aten.bilinear.default)
def _(d: Draw) -> Arguments:
    n, i, j, o = d.split(), d.split(), d.split(), d.split()
    return (d.real(n, i), d.real(n, j), d.real(o, i, j), *((d.real(o),) if d.yes() else ()))


sampler(aten.bucketize.Tensor)(lambda d: (d.real(*d.sizes(1, 3)), d.real(5).sort()[0]))


@sampler(aten.searchsorted.Tensor)
def _(d: Draw) -> Arguments:
    n = d.split()
    return (d.real(n, 5).sort(-1)[0], d.real(n, d.split()))


@sampler(aten.cosine_similarity.default)
def _(d: Draw) -> Arguments:
    shape = [d.split(), d.split(), 3]
    return (d.real(*shape), d.real(*shape), d.dim(3))


@sampler(aten.pairwise_distance.default)
def _(d: Draw) -> Arguments:
    shape = [d.split(), d.split(), 3]
    return (d.real(*shape), d.real(*shape), 2.0, 1e-6, d.yes())


sampler(aten.linalg_cross.default)(lambda d: ((d.real(6, 3, 4), d.real(6, 3, 4)), {"dim": 1}))


@sampler(aten.diagonal.default)
def _(d: Draw) -> Arguments:
    a, b = d.rng.sample(range(4), 2)
    return (d.real(*[d.split() for _ in range(4)]), d.choice(0, 1), a, b)


@sampler(aten.diag_embed.default)
def _(d: Draw) -> Arguments:
    a, b = d.rng.sample(range(4), 2)
    return (d.real(d.split(), d.split(), 3), d.choice(0, 1), a, b)


@sampler(aten.instance_norm.default)
def _(d: Draw) -> Arguments:
    x = image(d, d.choice(1, 2))
    weight, bias = d.choice((None, None), (d.real(x.shape[1]), d.real(x.shape[1])))
    return (x, weight, bias, None, None, True, 0.1, 1e-5, False)


@sampler(aten._weight_norm.default)
def _(d: Draw) -> Arguments:
    kept = d.choice(0, 1)
    x = d.real(d.split(), d.split(), 3)
    return (x, d.real(*(n if k == kept else 1 for k, n in enumerate(x.shape))), kept)


@sampler(aten.prelu.default)
def _(d: Draw) -> Arguments:
    x = image(d, d.choice(0, 1, 2))
    return (x, d.real(d.choice(1, x.shape[1])))


@sampler(aten.scatter_reduce.two)
def _(d: Draw) -> Arguments:
    x = d.real(d.split(), d.split(), d.split())
    dim = d.dim(3)
    index = d.ids(x.shape[dim], *x.shape)
    return (x, dim, index, d.real(*x.shape), d.choice("sum", "amax", "mean"))


@sampler(aten.index_fill.int_Scalar)
def _(d: Draw) -> Arguments:
    x, dim = d.real(d.split(), d.split(), d.split()), d.dim(3)
    return (x, dim, d.ids(x.shape[dim], 2), 0.5)


@sampler(aten.take_along_dim.default)
def _(d: Draw) -> Arguments:
    x, dim = d.real(d.split(), d.split(), d.split()), d.rng.randrange(3)
    shape = [d.split() if n == dim else d.choice(1, size) for n, size in enumerate(x.shape)]
    return (x, d.ids(x.shape[dim], *shape), dim)


sampler(aten.logspace.default)(lambda d: (0.0, 1.0, d.split()))
sampler(aten.tril_indices.default, aten.triu_indices.default)(lambda d: (3, d.split()))
sampler(aten.hann_window.default, aten.hamming_window.default)(lambda d: (d.split() + 1,))
sampler(aten.hann_window.periodic)(lambda d: (d.split() + 1, d.yes()))
