"""More bandwidth, memory or devices never make the best plan slower."""

from dataclasses import replace

import pytest
from deep_models import Deep, searched

from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import Link

pytest.importorskip("transformers")
LLAMA = Deep(preset="llama2-7b", layers=32, tokens=4096)
LABELLED_ON = "64xh100"


def step_s(cluster: ClusterSpec) -> float:
    found = searched(LLAMA, LABELLED_ON, cluster, 64)
    assert found.best is not None
    return found.best.seconds


def cluster(hosts: int = 2, gigabytes: float = 40.0, times: float = 1.0) -> ClusterSpec:
    """Hosts of eight devices. Links inside hosts and between them are `times` as fast."""
    spec = ClusterSpec.preset(f"{8 * hosts}xh100")
    (group,) = spec.groups
    assert group.in_host is not None
    link = Link(bytes_per_s=times * 5e9, latency_s=1e-5)
    device = replace(group.device, memory_bytes=round(gigabytes * 1e9))
    in_host = replace(group.in_host, bytes_per_s=times * group.in_host.bytes_per_s)
    return replace(spec, groups=(replace(group, device=device, in_host=in_host),), inter_host=link)


@pytest.mark.parametrize("base", [{}, {"hosts": 4, "gigabytes": 25.0}], ids=["two hosts", "four hosts, little memory"])
@pytest.mark.parametrize("name", ["times", "gigabytes", "hosts"])
def test_more_is_not_slower(name: str, base: dict[str, float]) -> None:
    usual = {"hosts": 2, "gigabytes": 40.0, "times": 1.0} | base
    seconds = [step_s(cluster(**(usual | {name: usual[name] * factor}))) for factor in (1, 2)]  # type: ignore[arg-type]
    assert seconds[1] < seconds[0]  # here each of them is short
