"""The search finds the plans that engineers choose for known cases, without a rule for them."""

from dataclasses import replace

import pytest
from deep_models import Deep, captured_whole, searched

from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import Link
from autopar.search.pricing.exact import PricedPlan

pytest.importorskip("transformers")
GPT3 = Deep(preset="gpt3-175b", layers=96, tokens=2048)
LLAMA = Deep(preset="llama2-7b", layers=32, tokens=4096)
A100S, H100S = "128xa100-80gb", "64xh100"


def best(model: Deep, labelled_on: str, cluster: ClusterSpec, global_batch: int) -> PricedPlan:
    found = searched(model, labelled_on, cluster, global_batch)
    assert found.proof.is_proven
    assert found.best is not None
    return found.best


def with_memory(memory_bytes: float, cluster: str = "8xh100") -> ClusterSpec:
    spec = ClusterSpec.preset(cluster)
    device = replace(spec.groups[0].device, memory_bytes=round(memory_bytes))
    return replace(spec, groups=(replace(spec.groups[0], device=device),))


def test_tensor_and_sequence_parallelism_inside_hosts_for_175_billion() -> None:
    degrees = best(GPT3, A100S, ClusterSpec.preset(A100S), 128).degrees
    assert 2 <= degrees.tp <= 8  # devices of a host
    assert GPT3.works_of(A100S)(degrees.tp).sequence_parallel
    assert degrees.pp > 1


@pytest.mark.parametrize(("gigabytes", "zero"), [(84.94, (1, 2, 3)), (80, (2, 3))])  # an H100's, and a little less
def test_sharded_data_parallelism_alone_for_7_billion_on_fast_links(gigabytes: float, zero: tuple[int, ...]) -> None:
    degrees = best(LLAMA, H100S, with_memory(gigabytes * 1e9, H100S), 256).degrees
    assert (degrees.tp, degrees.pp, degrees.dp_shard) == (1, 1, 64)
    assert degrees.zero in zero


@pytest.mark.parametrize(("gigabit", "has_stages"), [(400, False), (40, True), (10, True)])
def test_a_pipeline_across_hosts_where_links_between_them_are_slow(gigabit: float, has_stages: bool) -> None:
    link = Link(bytes_per_s=gigabit * 1e9 / 8 / 8, latency_s=2e-5)  # eight devices share a host's card
    degrees = best(LLAMA, H100S, replace(ClusterSpec.preset("32xh100"), inter_host=link), 64).degrees
    assert (degrees.pp > 1) == has_stages
    if has_stages:
        assert degrees.pp % 4 == 0  # every host is a stage, or several
        assert degrees.tp * degrees.dp <= 8


def test_recomputation_only_where_memory_forces_it() -> None:
    roomy, tight = (best(LLAMA, H100S, with_memory(gb * 1e9), 64) for gb in (95, 21.5))  # of which a plan may use 78 %
    assert roomy.degrees.recompute == "none"
    assert tight.degrees.recompute == "full"
    assert tight.seconds > roomy.seconds


@pytest.mark.long
def test_repeated_layers_are_those_of_a_whole_capture() -> None:
    whole = captured_whole(LLAMA, H100S)
    for tp in (1, 8):
        captured, repeated = whole.works(tp), LLAMA.works_of(H100S)(tp)
        assert repeated.calls == captured.calls
        assert repeated.counts == captured.counts
        assert repeated.num_parameters == captured.num_parameters
        assert repeated.family.blocks == captured.family.blocks
