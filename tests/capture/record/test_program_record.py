"""A program that was written down equals the program: its graphs, their annotations, and their results."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from conv_models import resnet
from tiny_models import Example
from torch import fx

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.capture.record.file import from_bytes, to_bytes
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.runtime.codegen.execute import run_reference

KEPT = ("info", "key", "batch_power")
MODELS = (tiny_models.llama, tiny_models.gpt2, tiny_models.megatron, resnet)


def written_out(graph: fx.Graph) -> list[str]:
    """Every node with its operands and the annotations that are kept."""
    return [f"{n.format_node()} {n.args} {n.kwargs} {[(k, n.meta.get(k)) for k in KEPT]}" for n in graph.nodes]


def losses(program: Program, example: Example) -> torch.Tensor:
    model, inputs = example
    values = run_reference(program, dict(model.named_parameters()), inputs, dict(model.named_buffers()))
    found: torch.Tensor = values[program.loss].detach()
    return found


@pytest.mark.parametrize("made", MODELS, ids=lambda made: made.__name__)
def test_nothing_is_lost(made: Callable[[], Example]) -> None:
    example = made()
    program = capture_program(*example)
    found = from_bytes(to_bytes(program))
    assert found.fingerprint == program.fingerprint
    pairs = zip((*program.blocks, program.constants), (*found.blocks, found.constants), strict=True)
    assert all(written_out(one.graph) == written_out(other.graph) for one, other in pairs)
    assert found.calls == program.calls and found.every_parameter == program.every_parameter
    assert found.inputs == program.inputs and found.updates == program.updates and found.outputs == program.outputs
    mesh = Mesh.of(dp=2, tp=2)
    assert [b.keys() for b in analyse(found, mesh).bounds] == [b.keys() for b in analyse(program, mesh).bounds]
    assert torch.equal(losses(found, example), losses(program, example))


WRITE = """
from autopar.models.load import resolve_model
from autopar.capture.record.file import to_bytes
from autopar.capture.program import capture_program
found = resolve_model("mixtral-8x7b", layers=1, hidden=64, seq_len=16, batch=2)
program = capture_program(found.model, found.example_inputs)
path.write_bytes(to_bytes(program))
print(program.fingerprint)
"""
READ = """
from autopar.capture.record.file import from_bytes
print(from_bytes(path.read_bytes()).fingerprint)
"""


@pytest.mark.long
def test_operators_of_ours_in_a_process_that_captured_nothing(tmp_path: Path) -> None:
    """Experts choose by topk, each of whose results is an operator that a capture defines."""
    said = []
    for code in (WRITE, READ):
        code = f"from pathlib import Path; path = Path({str(tmp_path / 'program')!r}){code}"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        said.append(result.stdout.split()[-1])
    assert said[0] == said[1]
