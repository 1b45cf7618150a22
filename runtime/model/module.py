"""`ParallelModel`, the model that a user trains: global names and shapes outside, shards and collectives inside."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch.utils.data import Dataset, default_collate

from autopar.errors import RuntimeInputError
from autopar.runtime.data.loader import LoaderOptions, ParallelLoader, loader_problems
from autopar.runtime.data.parts import Collate, Split
from autopar.runtime.distributed.hang_report import reports_position
from autopar.runtime.model import zero
from autopar.runtime.model.checkpointed import CheckpointedModel
from autopar.runtime.model.compiled import CompiledProgram, readable
from autopar.runtime.model.expert_load import Counts, counting, load_of_experts, routings
from autopar.runtime.model.inputs import as_batch, rows_of_rank
from autopar.runtime.model.outputs import StepLoss, refuse_autocast, refuse_move, with_backward
from autopar.runtime.model.pipeline import refuse_compiling
from autopar.runtime.model.preflight_check import STEP
from autopar.runtime.model.running import COMPARED
from autopar.runtime.parameters.grad_scaler import adopted, scaler_settings
from autopar.runtime.parameters.shown_tensor import whole_of
from autopar.runtime.profile.trace_step import trace_step


class ParallelModel(CheckpointedModel):
    """A model split over the ranks of a job according to a `Plan`; `autopar.parallelize` makes it.

    Parameters are DTensors under the model's own names. A pipeline rank holds the parameters of its own stages only,
    so names, state and gradients are those of its stages. Every method is collective: all ranks call the same methods
    in the same order.

    `train()` and `eval()` set the mode of the model. A new input shape, and eval mode, capture the model again.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
        >>> batch = (torch.randn(4, 8), torch.arange(4))
        >>> loss_fn = torch.nn.functional.cross_entropy
        >>> parallel = autopar.parallelize(model, "1xcpu", example_inputs=batch, plan={"dp": 1}, loss_fn=loss_fn)
        >>> optimizer = torch.optim.AdamW(parallel.parameters())
        >>> loss = parallel.forward_backward(batch)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """The end of every `to`, `cuda` and `float`: only calls that change nothing are allowed."""
        refuse_move(self.device, {parameter.dtype for parameter in self.parameters()}, fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelModel":
        """Copy the weights and the mode: `AveragedModel` keeps such a copy. Hooks are not copied. Collective."""
        caller = sys._getframe(2)
        if caller.f_globals.get("__name__") == "torch.optim.swa_utils" and not caller.f_locals.get("use_buffers"):
            raise RuntimeInputError(
                "AveragedModel would average parameters in another order than parallel.parameters(), which mixes "
                "them; pass use_buffers=True"
            )
        state = self.state_dict()

        def source(name: str) -> torch.Tensor:
            return whole_of(state[name])

        model = ParallelModel(
            self.program,
            self.plan,
            source,
            self.device,
            seed=self.streams.seed,
            replan=self._shapes.replan,
            buffers=self.buffer,
            origin=self._origin,
        )
        model._step = self._step
        params = dict(self.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(params[name].requires_grad)
        memo[id(self)] = model
        return model.train(self.training)

    # Running.

    def compile(self, **options: Any) -> None:
        """Run the generated blocks through `torch.compile` from the next step on.

        A distinct block is compiled once for all its calls, with its collectives.

        Args:
            options: The options of `torch.compile`, such as ``backend="inductor"``.

        Raises:
            RuntimeInputError: The plan's pipeline schedule splits the backward pass, which compiled code cannot do.

        Example:
            >>> parallel.compile(backend="eager")
        """
        refuse_compiling(self.plan.degrees)
        self._compile = partial(torch.compile, **options)

    @reports_position
    def forward(self, *args: Any, **inputs: Any) -> torch.Tensor:
        """Compute the loss of one micro-batch. Its `backward()` makes the gradients, summed over all ranks.

        So a loop that is written for one device runs: ``loss = parallel(**batch); loss.backward()``. Several calls
        before a step add up their gradients. `no_sync` spares sums then. `forward_backward` runs a step of several
        micro-batches in one call.

        Args:
            args: This rank's tensors in order, or one dict of them.
            inputs: This rank's tensors by name.

        Returns:
            The loss of this call's batch over all data-parallel ranks, equal on every rank.

        Raises:
            RuntimeInputError: The plan has pipeline stages, or a batch has a wrong name, shape or dtype.

        Example:
            >>> loss = parallel(*batch)
            >>> loss.backward()
        """
        batch = inputs or as_batch(self.program, args)
        degrees = self.plan.degrees
        if degrees.pp > 1:
            raise RuntimeInputError(
                f"this plan has {degrees.num_stages} pipeline stages, which run forward and backward together; write "
                "loss = parallel.forward_backward(batch), without backward()"
            )
        refuse_autocast(self.device.type)
        compiled, (values,), _ = self._prepared(batch, STEP, 1)
        self._forget_copies()
        (module,) = self.stage_modules().values()
        self._before_backward(module, last=self._sums)
        results = self._run_stage(compiled, module, values, 0, num_averaged=1)
        loss: torch.Tensor = results[compiled.program.loss]
        self._step += 1
        self._forget_copies()
        if not loss.requires_grad:
            zero.free_gathered(module)
            return loss
        return with_backward(loss, self._begin_backward, partial(self._end_backward, sums=self._sums))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave out the sums of gradients in the calls of a `with` block, as in DDP. The next call sums them all.

        ZeRO 2 and 3 sum the gradients of every call, because no rank holds whole gradients.

        Returns:
            A context.

        Example:
            >>> with parallel.no_sync():
            ...     parallel(*batch).backward()
            >>> parallel(*batch).backward()
        """
        before, self._sums = self._sums, False
        try:
            yield
        finally:
            self._sums = before

    @reports_position
    def forward_backward(
        self, batch: Mapping[str, Any] | Sequence[Any], *, scaler: torch.amp.GradScaler | None = None
    ) -> torch.Tensor:
        """Compute the loss and gradients of one training step.

        Gradients are added to `.grad`, already summed over ranks. With fewer sequences than planned the batch is
        padded, if the model can ignore samples. Another sequence length, or another number of sequences on all ranks,
        captures the model again, once for each shape.

        Before anything else is sent, the ranks compare step, scalers, shapes and data. This is one all-gather on the
        host of 8 × (7 + 2 × inputs) bytes a rank. Another one follows if a rank is unsure of the indices in its batch.

        Args:
            batch: This rank's part of the global batch, ``micro_batch × micro_batches × accumulate`` sequences: a dict
                of tensors by name, or a tuple. Ranks that differ only in ``tp`` or ``pp`` pass the same data.
            scaler: The scaler of the loss, for float16. Gradients are scaled, as after ``scaler.scale(loss)``. A
                `torch.amp.GradScaler` becomes an `autopar.GradScaler`. Every rank passes one with the same settings.

        Returns:
            The loss of the global batch, not scaled, a scalar that is equal on every rank. If the plan says
            `per_micro_batch`, it is the mean of the micro-batches' losses.

        Raises:
            RuntimeInputError: A batch has a wrong name, shape or dtype, or the ranks disagree. All ranks raise it.
                Autocast is on.

        Example:
            >>> loss = parallel.forward_backward(batch)
            >>> loss.shape
            torch.Size([])
        """
        refuse_autocast(self.device.type)
        degrees = self.plan.degrees
        compiled, values, _ = self._prepared(batch, STEP, degrees.num_micro_batches, scaler_settings(scaler))
        compiled.code_modules(outputs=False)
        earlier = self._set_aside()
        self._forget_copies()
        self.ties.copy_to_twins(self.stage_modules())
        scale = None if scaler is None else adopted(scaler).scale(torch.ones((), device=self.device))
        if degrees.pp == 1:
            loss = self._step_without_stages(compiled, values, scale)
        else:
            loss = self._step_in_stages(compiled, values, scale)
        self._forget_copies()
        with torch.no_grad():
            self.ties.sum_gradients(self.stage_modules())
            self._sum_deferred()
            self._show_gradients(earlier)
        self._step += 1
        return loss.detach().as_subclass(StepLoss)

    def local_batch(self, batch: Mapping[str, Any] | Sequence[Any]) -> Any:
        """Give this rank's part of a global batch.

        A model that pairs rows of its batch pairs rows of the global batch. Rows of a pair belong into one sample.

        Args:
            batch: The sequences of all data-parallel ranks, which divide them evenly: a dict of tensors, or a tuple.

        Returns:
            A dict or a tuple. Inputs without a batch dimension stay whole.

        Raises:
            RuntimeInputError: The number of sequences cannot be divided evenly.

        Example:
            >>> parallel.local_batch(batch)[0].shape[0] == batch[0].shape[0] // parallel.plan.degrees.dp
            True
        """
        dp = self.rank_mesh.sample_ranks
        return rows_of_rank(self.program, batch, dp.coordinate, dp.degree)

    def loader(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        *,
        shuffle: bool = False,
        seed: int = 0,
        global_batch: int | None = None,
        drop_last: bool = False,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> ParallelLoader:
        """Make a loader that gives each rank its part of every global batch of a dataset. Collective.

        The order of samples depends on `seed` and the epoch alone. `state_dict()` of the loader is the position in the
        data, and `load_state_dict` goes on from it under any plan: no sample is left out or repeated. Ranks that differ
        only in ``tp`` or ``pp`` get equal batches, also if `dataset` or `collate_fn` draw random numbers.

        Args:
            dataset: A dataset with a length and an index, or an iterable. Every rank and worker reads an iterable
                whole, and keeps its own samples.
            shuffle: Whether each epoch has another order. An iterable shuffles itself.
            seed: The seed of the order, and of the random numbers that `dataset` and `collate_fn` draw.
            global_batch: The samples of a batch on all ranks, by default those of the plan's step.
            drop_last: Whether an epoch ends before a short global batch. By default the last batch may be short, or
                empty on some ranks, if the model can ignore padding.
            collate_fn: A function from a list of samples to a batch.
            num_workers: The number of processes that read data ahead. They are started for every epoch.
            prefetch_factor: The batches that each worker holds in advance, 2 by default.
            pin_memory: Whether batches are copied into pinned memory, for faster copies to a GPU.

        Returns:
            The loader. Iterating over it yields this rank's batches of the rest of the epoch.

        Raises:
            RuntimeInputError: An argument cannot be used, or the last batch could not run. All ranks raise it.

        Example:
            >>> loader = parallel.loader(torch.utils.data.TensorDataset(*batch), shuffle=True, seed=7)
            >>> losses = [parallel.forward_backward(part) for part in loader]
            >>> loader.epoch
            1
        """
        options = LoaderOptions(
            shuffle=shuffle,
            seed=seed,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
        )
        degrees, ranks = self.plan.degrees, self._preflight
        planned = degrees.dp * self.base.micro_batch * degrees.num_micro_batches
        size = planned if global_batch is None else global_batch
        ranks.all_or_none("the data cannot be read", list(loader_problems(dataset, options, size, degrees.dp)))
        micro_batches = degrees.num_micro_batches if size == planned else 1
        index = self.rank_mesh.sample_ranks.coordinate
        split = Split(global_batch=size, index=index, count=degrees.dp, drop_last=drop_last)
        return ParallelLoader(
            dataset,
            split,
            options,
            agree=ranks.agree,
            lockstep=ranks.in_lockstep,
            short=lambda rest: self._refusal_of(split.counts(rest), micro_batches),
        )

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over this rank's batches until all ranks run out of data together.

        Each batch takes one all-gather of a few integers.

        Args:
            loader: An iterable of batches, such as a `DataLoader`.

        Yields:
            The items of `loader`.

        Raises:
            RuntimeInputError: Some ranks run out of data before others. The message names them; all ranks raise it.

        Example:
            >>> losses = [parallel.forward_backward(item) for item in parallel.batches([batch, batch])]
            >>> len(losses)
            2
        """
        return self._preflight.in_lockstep(loader)

    @reports_position
    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any] | Sequence[Any]) -> dict[str, torch.Tensor]:
        """Compute the loss and outputs of one micro-batch without gradients.

        After `eval()` the result is that of the unmodified model in eval mode, which is captured at the first call. In
        training mode the training program runs without dropout.

        Args:
            batch: This rank's sequences: a dict of tensors by name, or a tuple. If ranks hold different numbers of
                sequences, the batch is padded and only the loss is returned.

        Returns:
            The loss under ``"loss"``, and the model's outputs by name as DTensors with global shapes. In a pipeline
            every rank has the loss, and the outputs of its own stages.

        Raises:
            RuntimeInputError: A batch has a wrong name, shape or dtype, or the ranks disagree. All ranks raise it.
            PlanError: The captured model cannot run as the plan says.

        Example:
            >>> result = parallel.eval().evaluate(batch)
            >>> tuple(result["loss"].shape)
            ()
            >>> parallel = parallel.train()
        """
        return self._evaluated(batch, self._functions)[1]

    @reports_position
    @torch.no_grad()
    def expert_load(self, batch: Mapping[str, Any] | Sequence[Any]) -> dict[str, torch.Tensor]:
        """Count how many rows of a batch each expert gets: tokens times the experts of a token. Collective.

        It runs the batch as `evaluate` does. Only routing by sorting is counted; where every expert computes every
        token, no rows are sent to it.

        Args:
            batch: This rank's sequences, as for `evaluate`. All ranks need equally many.

        Returns:
            By the path of each call of a block with experts: int64 counts of the whole batch, one for each expert.
            Every rank has all of them.

        Raises:
            RuntimeInputError: No block sorts tokens by expert, or the ranks have different numbers of sequences.

        Example:
            >>> parallel.expert_load(batch)
            Traceback (most recent call last):
            autopar.errors.RuntimeInputError: no block of this model sorts tokens by expert; ...
        """
        if not any(routings(block.graph) for block in self.program.blocks):
            raise RuntimeInputError(
                "no block of this model sorts tokens by expert; only such routing has a load (docs/experts.md)"
            )
        counts: Counts = {}

        def functions(compiled: CompiledProgram, outputs: bool) -> Sequence[Callable[..., Any]]:
            return counting(compiled.code_modules(outputs=outputs), counts)

        compiled, _ = self._evaluated(batch, functions, may_pad=False)
        stages = compiled.stages
        calls = [call for index in sorted(self.stage_modules()) for call in stages[index].calls]
        return load_of_experts(compiled.program, counts, calls, self.device)

    # Reading.

    def trace(self, path: str | os.PathLike[str], batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """Profile one training step on all ranks, and write it as a Chrome trace (docs/trace.md).

        Two steps run before the profiled one. Weights, gradients, buffers and the step count stay unchanged. Gradients
        take twice their memory meanwhile. Rank 0 writes the file, whole or not at all.

        Args:
            path: The JSON file to write, for ui.perfetto.dev or chrome://tracing. Every rank is a process, with tracks
                for its compute, the collectives of each mesh dimension and the messages between stages.
            batch: This rank's part of the global batch, as for `forward_backward`.

        Raises:
            InputError: The file cannot be written. All ranks raise it.
            RuntimeInputError: As `forward_backward`.

        Example:
            >>> parallel.trace("step.json", batch)
        """
        step, trained, grads = self._step, self.num_trained, [(p, p.grad) for _, p in self.stored_parameters()]
        num_steps, self._num_steps = self._num_steps, max(COMPARED) + 1  # no traced step compares weights
        buffers = [(held, held.clone()) for held in map(self.buffer, self.program.updates)]

        def one_step() -> None:
            self.zero_grad()
            self.forward_backward(batch)

        try:
            sizes = {
                "sequence": self.program.sequence,
                "parameters": sum(info.num_elements for info in self.program.parameters.values()),
            }
            trace_step(path, one_step, self.rank_mesh, self.plan.degrees, self.device, sizes=sizes)
        finally:
            self._step, self.num_trained, self._num_steps = step, trained, num_steps
            for parameter, grad in grads:
                parameter.grad = grad
            for held, before in buffers:
                held.copy_(before)

    def code(self, block: int | str) -> str:
        """Give the generated code of a block, as readable Python.

        Args:
            block: The index of a distinct block, its name, or the module path of one of its calls.

        Returns:
            The code of its forward pass, with every collective.

        Raises:
            RuntimeInputError: The model has no such block. The message lists the names.

        Example:
            >>> print(parallel.code(0).splitlines()[0][:4])
            def
        """
        index = block if isinstance(block, int) else self._block_index(block)
        return readable(self.code_modules(outputs=False)[index].code)

    def _block_index(self, name: str) -> int:
        for call in self.program.calls:
            if name in (call.path, self.program.blocks[call.block].name):
                return call.block
        names = sorted({b.name for b in self.program.blocks})
        raise RuntimeInputError(f"no block {name!r}; the distinct blocks are {names}")

    def __repr__(self) -> str:
        degrees = self.plan.degrees
        stages = f"pp={degrees.pp}, " if degrees.pp > 1 else ""
        lines = [f"ParallelModel({stages}tp={degrees.tp}, dp={degrees.dp}, zero={degrees.zero})"]
        for i, block in enumerate(self.program.blocks):
            uses = len(self.program.uses_of_block(i))
            lines.append(f"\n# block {i}: {block.name}, called {uses} time{'s' * (uses > 1)}\n{self.code(i)}")
        return "\n".join(lines)


def _refuse_compiler(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """`torch.compile(parallel)` registers the model in a module of its own."""
    if isinstance(child, ParallelModel) and type(parent).__name__ == "OptimizedModule":
        raise RuntimeInputError("torch.compile cannot follow the steps of this model; call parallel.compile() instead")


torch.nn.modules.module.register_module_module_registration_hook(_refuse_compiler)
