"""The gain of other orders of ranks than the default order: `python benchmarks/rank_orders.py [CASE ...]`.

A case is ``MODEL@CLUSTER``. ``MODEL@CLUSTER:GBIT`` replaces the link of a host by one of GBIT Gb/s, which its devices
share. Every case is searched with the default order alone, and with every order of `autopar.ir.rank_order`. Steps have
2 or 16 sequences of 4,096 tokens per device. Stage cuts make the slowest stage fastest.
"""

import argparse
from dataclasses import replace

from search_problem import Problem

from autopar.cost_model.machine.cluster import cluster_machine
from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import Link
from autopar.ir.rank_order import ORDERS
from autopar.search.driver.search import SearchState, search_degrees
from autopar.search.result.format import plan_in_words
from autopar.search.result.result import degrees_in_plain

CASES = (
    "llama2-7b@32xrtx4090:10",
    "llama2-7b@32xl40s:40",
    "llama2-7b@64xa100-80gb:100",
    "llama3-8b@32xh100:10",
    "llama3-8b@64xh100:100",
    "llama3-8b@64xh100:400",
    "llama3-8b@256xh100:400",
    "llama3-70b@64xa100-40gb:100",
    "llama3-70b@128xh100:40",
    "llama3-70b@128xh100:100",
    "llama3-70b@1024xh100:400",
    "llama2-70b@128xa100-80gb:100",
    "llama3-405b@512xh100:100",
    "llama3-405b@1024xh100:400",
    "llama2-7b@64xa100-80gb",
    "llama3-8b@64xh100",
    "llama3-8b@256xh100",
    "llama3-70b@64xa100-40gb",
    "llama3-70b@128xh100",
    "llama3-70b@1024xh100",
    "llama3-405b@1024xh100",
)
SEQUENCE = 4096
SEQUENCES = (2, 16)  # of a step, for every device


def linked(name: str, gigabits: str) -> ClusterSpec:
    """A preset whose hosts share a link of `gigabits` per second, or the preset itself if `gigabits` is empty."""
    spec = ClusterSpec.preset(name)
    if not gigabits:
        return spec
    assert spec.inter_host is not None
    each = float(gigabits) * 1e9 / 8 / spec.groups[0].devices_per_host
    return replace(spec, inter_host=Link(bytes_per_s=each, latency_s=spec.inter_host.latency_s, name="network"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    for case in parser.parse_args().cases:
        model, _, where = case.partition("@")
        cluster, _, gigabits = where.partition(":")
        for sequences in SEQUENCES:
            told = compared(model, linked(cluster, gigabits), cluster, sequences)
            print(f"{case:30s} {sequences:>2} {told}", flush=True)


def compared(model: str, spec: ClusterSpec, cluster: str, sequences: int) -> str:
    """The best plan of all orders, and its gain over the best plan of the default order."""
    problem = Problem(model=model, cluster=cluster, sequence=SEQUENCE, global_batch=sequences * spec.num_devices)
    machine = cluster_machine(spec, problem.on.machine.engine, problem.on.machine.mechanisms, precision="bf16")
    on = replace(problem.on, machine=machine)

    def searched(*orders: str) -> SearchState:
        narrowed = problem.constraints.narrowed({"order": orders})
        return search_degrees(problem.works, spec, narrowed, on, most_exact=2000)

    found = [searched(ORDERS[0]), searched(*ORDERS)]
    default, best = (one.best for one in found)
    if default is None or best is None:
        return "nothing fits"
    proven = "proven" if all(one.proof.is_proven for one in found) else "not proven"
    words = plan_in_words(degrees_in_plain(best.degrees, best.cuts))
    gain = 1 - best.seconds / default.seconds
    return f"{gain:6.1%} ({proven}, {best.seconds:.2f} s): {words}"


if __name__ == "__main__":
    main()
