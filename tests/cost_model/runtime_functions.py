"""The functions of generated code, by the pair of types that each converts."""

from autopar.runtime.codegen import conversions as functions

FUNCTIONS = {
    ("I", "R"): functions.invariant_to_replicate,
    ("P", "I"): functions.all_reduce_to_invariant,
    ("P", "R"): functions.all_reduce_to_replicate,
    ("P", "S"): functions.reduce_scatter,
    ("S", "R"): functions.all_gather_to_replicate,
    ("S", "I"): functions.all_gather_to_invariant,
    ("I", "S"): functions.shard_of_invariant,
    ("S", "S"): functions.all_to_all,
    ("I", "P"): functions.partial_of_invariant,
    ("S", "P"): functions.partial_of_shard,
    ("R", "I"): functions.replicate_to_invariant,
    ("R", "S"): functions.shard_of_replicate,
    ("R", "P"): functions.partial_of_replicate,
}
