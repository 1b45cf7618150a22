"""Look-ups by ids: embedding tables and one-hot vectors."""

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import dims, original, rule_from, slot_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Step


def _emit_embedding(local: Call) -> tuple[Step, ...]:
    """With rows split, each rank looks up its own ids and yields zeros for the others."""
    mesh_dim = local.mesh_dim("v")
    if mesh_dim is None:
        return (original(local),)
    padding = local.named("padding_idx", -1)
    return (Step("vocab_parallel_embedding", (*local.args[:2], padding, mesh_dim)),)


@rule(aten.embedding.default)
def embedding(call: Call) -> Rule:
    """``"v d, ... -> ... d"``: v by rewrite, only as its outermost axis because ids are compared with an offset."""
    weight, ids = slot_of(call.args[0]), slot_of(call.args[1])
    batch = dims(call.operands[ids].shape, "b")
    counted = bool(call.named("scale_grad_by_freq", False)) or bool(call.named("sparse", False))
    whole = {"v", *(f for dim in batch for f in dim)} if counted else set()
    specs: dict[int, list[Dim]] = {weight: [("v",), ("d",)], ids: batch}
    return rule_from(
        call,
        specs,
        [*batch, ("d",)],
        whole=whole,
        linear=[{weight}],
        outermost={"v"},
        emit=_emit_embedding,
    )


@rule(aten.one_hot.default)
def one_hot(call: Call) -> Rule:
    spec = dims(call.operands[0].shape)
    if not isinstance(call.named("num_classes", -1), int) or call.named("num_classes", -1) < 0:
        raise RuleError("one_hot whose number of classes depends on data")
    return rule_from(call, [spec], [*spec, ("v",)], whole={"v"})
