"""Samples of operators that pick, replace and pool, and of recurrent networks."""

from typing import Any

import torch
from rule_samples import Arguments, Draw, aten, sampler

from autopar.rules.operators import BATCH_STATISTIC, output_of


def _picking(d: Draw) -> tuple[torch.Tensor, int]:
    shape = [d.split() for _ in range(d.choice(2, 3))]
    return d.real(*shape), d.dim(len(shape))


@sampler(output_of(aten.topk.default, 1))
def _(d: Draw) -> Arguments:
    x, dim = _picking(d)
    return (x, d.choice(1, 2), dim, d.yes())


@sampler(output_of(aten.kthvalue.default, 1))
def _(d: Draw) -> Arguments:
    x, dim = _picking(d)
    return (x, d.choice(1, 2), dim, d.yes())


@sampler(output_of(aten.max.dim, 1), output_of(aten.min.dim, 1))
@sampler(output_of(aten.median.dim, 1), output_of(aten.nanmedian.dim, 1), output_of(aten.mode.default, 1))
def _(d: Draw) -> Arguments:
    return (*_picking(d), d.yes())


@sampler(output_of(aten.sort.default, 1), aten.argsort.default)
def _(d: Draw) -> Arguments:
    return (*_picking(d), d.yes())


@sampler(output_of(aten.cummax.default, 1), output_of(aten.cummin.default, 1))
def _(d: Draw) -> Arguments:
    return _picking(d)


@sampler(output_of(aten.sort.stable, 1))
def _(d: Draw) -> Arguments:
    x, dim = _picking(d)
    return (x,), {"stable": True, "dim": dim}


@sampler(aten.slice_scatter.default)
def _(d: Draw) -> Arguments:
    x, dim = _picking(d)
    start = d.choice(0, 1)
    return (x, d.real(*x.narrow(dim, start, 1).shape), dim, start, start + 1)


@sampler(aten.select_scatter.default)
def _(d: Draw) -> Arguments:
    x, dim = _picking(d)
    return (x, d.real(*x.select(dim, 1).shape), dim, 1)


@sampler(aten.index_put.default)
def _(d: Draw) -> Arguments:
    shape = [d.split() for _ in range(3)]
    places = d.choice([0], [1], [2], [0, 1])
    rows = torch.randperm(shape[places[0]], generator=d.torch)[:2]  # no row twice: which one stays is not defined
    indices = [
        (rows if n == places[0] else d.ids(shape[n], 2)) if n in places else None for n in range(max(places) + 1)
    ]
    region = [*shape[: places[0]], 2, *shape[places[-1] + 1 :]]
    return (d.real(*shape), indices, d.real(*d.choice(region, [1] * len(region), region[1:])))


@sampler(aten.index_copy.default)
def _(d: Draw) -> Arguments:
    x, dim = _picking(d)
    rows = torch.randperm(x.shape[dim], generator=d.torch)[:2]
    return (x, dim, rows, d.real(*x.narrow(dim, 0, 2).shape))


@sampler(BATCH_STATISTIC)
def _(d: Draw) -> Arguments:
    shape = [1, d.split(), 1, d.split()]
    return (d.real(*shape), d.real(*shape))


def _image(d: Draw, places: int, size: int = 4) -> torch.Tensor:
    return d.real(d.split(), d.split(), *[size] * places)


@sampler(aten.unfold.default)
def _(d: Draw) -> Arguments:
    x, dim = _picking(d)
    return (x, dim, 2, d.choice(1, 2))


@sampler(aten.pad.default)
def _(d: Draw) -> Arguments:
    return (_image(d, 2), [1, 1, 0, 1], d.choice("reflect", "replicate", "circular"))


def _recurrent(gates: int, num_states: int) -> Any:
    def draw(d: Draw) -> Arguments:
        batch, time, features, hidden = d.split(), 3, 2, 2
        batch_first, layers = d.yes(), d.choice(1, 2)
        x = d.real(batch, time, features) if batch_first else d.real(time, batch, features)
        states = [d.real(layers, batch, hidden) for _ in range(num_states)]
        params = []
        for layer in range(layers):
            width = hidden if layer else features
            rows = gates * hidden
            params += [d.real(rows, width), d.real(rows, hidden), d.real(rows), d.real(rows)]
        return (x, states if num_states > 1 else states[0], params, True, layers, 0.0, True, False, batch_first)

    return draw


for _index in range(3):
    sampler(output_of(aten.lstm.input, _index))(_recurrent(4, 2))
for _index in range(2):
    sampler(output_of(aten.gru.input, _index))(_recurrent(3, 1))
    sampler(output_of(aten.rnn_tanh.input, _index), output_of(aten.rnn_relu.input, _index))(_recurrent(1, 1))
