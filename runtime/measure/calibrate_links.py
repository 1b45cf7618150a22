"""Times of collectives by kind and size, over groups that share each tier of links as a mesh would share them.

    in_host      all ranks of each host, and pairs of them
    inter_host   ranks of equal number on every host

All groups of one choice run at once, as the groups of a mesh dimension do. The collectives are the functional ones
that generated code has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from autopar.ir.samples import Work
from autopar.runtime.distributed.mesh import ranks_by
from autopar.runtime.measure.calibrate_device import Runnable

_c10d = torch.ops._c10d_functional
_SIZES = {"cpu": tuple(2**i for i in range(10, 27, 2)), "cuda": tuple(2**i for i in range(10, 31, 2))}
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
OVERLAP_BYTES, OVERLAP_SIZE, OVERLAP_PRODUCTS = {"cpu": 2**22, "cuda": 2**28}, {"cpu": 256, "cuda": 8192}, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A partition of the ranks: each group's ranks, and the number of hosts of a group."""

    name: str
    ranks: tuple[tuple[int, ...], ...]
    hosts: int

    @property
    def size(self) -> int:
        return len(self.ranks[0])


def link_groups(hosts: Sequence[str]) -> list[Groups]:
    """The groups to measure if rank r is on `hosts[r]`. Empty if hosts have different numbers of ranks."""
    places = ranks_by(hosts)
    sizes = {len(ranks) for ranks in places.values()}
    if len(sizes) > 1:
        return []
    (size,), groups = sizes, list[Groups]()
    for part in sorted({2, size} if size % 2 == 0 else {size}):
        if part > 1:
            runs = [tuple(r[i : i + part]) for r in places.values() for i in range(0, size, part)]
            groups.append(Groups(name=f"{part} ranks of a host", ranks=tuple(runs), hosts=1))
    if len(places) > 1:
        across = tuple(zip(*places.values(), strict=True))
        groups.append(Groups(name=f"{len(places)} hosts", ranks=across, hosts=len(places)))
    return groups


def link_works(groups: Groups, device_type: str) -> list[Work]:
    """Every kind and size over groups, the smallest first. Sizes are of the whole tensor."""
    return [
        Work(part="collective", name=kind, amount=size, numbers={"ranks": groups.size, "hosts": groups.hosts})
        for size in _SIZES[device_type]
        for kind in _KINDS
        if kind != "point_to_point" or groups.size == 2
    ]


def overlap_works() -> list[Work]:
    return [Work(part="overlap", name=name, amount=1) for name in ("compute", "communicate", "both")]


def join_group(groups: Groups) -> dist.ProcessGroup:
    """This rank's group. Collective over all ranks, also over the ranks of other groups."""
    group = None
    for ranks in groups.ranks:
        new_group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            group = new_group
    assert isinstance(group, dist.ProcessGroup), groups
    return group


def prepared_collective(work: Work, group: dist.ProcessGroup, device: torch.device) -> Runnable:
    """A function that runs a collective once. Collective over the group."""
    ranks, name = group.size(), str(group.group_name)
    whole = torch.zeros(max(ranks, int(work.amount) // 4) // ranks * ranks, device=device)
    part = whole[: whole.numel() // ranks].clone()
    if work.name == "all_reduce":
        return lambda: _c10d.wait_tensor(_c10d.all_reduce(whole, "sum", name))
    if work.name == "all_gather":
        return lambda: _c10d.wait_tensor(_c10d.all_gather_into_tensor(part, ranks, name))
    if work.name == "reduce_scatter":
        return lambda: _c10d.wait_tensor(_c10d.reduce_scatter_tensor(whole, "sum", ranks, name))
    if work.name == "all_to_all":  # each rank holds a part of the whole and sends a part of that to each rank
        sizes = [max(1, part.numel() // ranks)] * ranks
        held = torch.zeros(sum(sizes), device=device)
        return lambda: _c10d.wait_tensor(_c10d.all_to_all_single(held, sizes, sizes, name))
    assert work.name == "point_to_point", work
    return partial(there_and_back, whole, dist.get_process_group_ranks(group), group)


def there_and_back(data: torch.Tensor, pair: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
    """A message from the first rank of a pair to the second and back: two of the work."""
    first, second = pair
    if dist.get_rank() == first:
        dist.send(data, second, group)
        dist.recv(data, second, group)
    else:
        dist.recv(data, first, group)
        dist.send(data, first, group)


def times_of_one(work: Work) -> int:
    """How often the prepared function does the work."""
    return 2 if work.name == "point_to_point" else 1


def prepared_overlap(work: Work, group: dist.ProcessGroup, device: torch.device) -> Runnable:
    """Products, an all-reduce, or the all-reduce started before the products and waited for behind them."""
    name, size = str(group.group_name), OVERLAP_SIZE[device.type]
    data = torch.zeros(OVERLAP_BYTES[device.type] // 4, device=device)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    if device.type == "cuda":
        a, b = a.bfloat16(), b.bfloat16()

    def compute() -> None:
        for _ in range(OVERLAP_PRODUCTS):
            torch.mm(a, b)

    def communicate() -> torch.Tensor:
        started: torch.Tensor = _c10d.all_reduce(data, "sum", name)
        return started

    def both() -> None:
        started = communicate()
        compute()
        _c10d.wait_tensor(started)

    actions: Mapping[str, Callable[[], object]] = {
        "compute": compute,
        "communicate": lambda: _c10d.wait_tensor(communicate()),
        "both": both,
    }
    return actions[work.name]
