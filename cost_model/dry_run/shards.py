"""The part of a parameter that one rank holds between steps. ZeRO shards it with FSDP2."""

from math import prod

from autopar.cost_model.dry_run.rank_view import RankView
from autopar.ir.storage import zero_dim_of, zero_ranks


def is_sharded(setting: RankView, name: str) -> bool:
    """Whether FSDP2 holds a parameter in shards between steps."""
    degrees, storage = setting.plan.degrees, setting.storages.get(name)  # none: unused, whole everywhere
    return degrees.fsdp_stage > 0 and storage is not None and zero_dim_of(degrees, storage) is not None


def padded_elements(setting: RankView, name: str) -> int:
    """Elements of one rank's part of a parameter, padded to what its ZeRO ranks divide."""
    shape, ranks = list(setting.own_shape(name)), zero_ranks(setting.plan.degrees, setting.storages[name])
    dim = setting.storages[name].zero_dim(ranks)
    assert dim is not None
    shape[dim] = -(-shape[dim] // ranks) * ranks
    return prod(shape)


def shard_elements(setting: RankView, name: str) -> int:
    """Elements of this rank's shard without padding, in the parts of `torch.chunk`."""
    storage = setting.storages[name]
    shape, ranks = list(setting.own_shape(name)), zero_ranks(setting.plan.degrees, storage)
    dim = storage.zero_dim(ranks)
    assert dim is not None
    size, place = -(-shape[dim] // ranks), setting.coordinates["dp_experts" if storage.is_of_experts else "dp_shard"]
    shape[dim] = max(0, min(size, shape[dim] - size * place))
    return prod(shape)


def local_gradient_elements(setting: RankView, name: str) -> int:
    """Elements of a parameter's gradient that a rank holds after the step."""
    return shard_elements(setting, name) if is_sharded(setting, name) else prod(setting.own_shape(name))
