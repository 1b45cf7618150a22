"""An optimizer's step in the backward pass: each parameter is updated as soon as its gradient is final.

The result is the step after the backward pass, bit for bit, under two conditions. The update of an element depends on
its own gradient alone. Nothing reads all gradients before the update, so gradients are not clipped by their norm.

    early    parameters on the host whose gradient is final when the last backward pass has summed it. The device
             computes with copies of their values
    late     all other parameters are updated when the backward pass ends: gradients of replicated and of tied
             parameters wait for their sums, and gradients with hooks wait for the whole step. With pipeline stages
             every parameter is late

Early updates run on a thread of their own, beside the backward pass. Nothing else reads the gradients of early
parameters before these updates end.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

from autopar._torch import private
from autopar.errors import RuntimeInputError
from autopar.runtime.parameters.user_view import has_hooks, show_gradient

# the update of an element depends on its own gradient, state and value
BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class BackwardStep:
    """One optimizer for each parameter. `early` ones step beside the backward pass; `take` moves their gradients."""

    def __init__(
        self,
        make: Make,
        parameters: Mapping[str, nn.Parameter],
        early: Mapping[nn.Parameter, str],
        take: Callable[[str], None],
    ) -> None:
        self.optimizers = {name: make([p]) for name, p in parameters.items() if p.requires_grad}
        for optimizer in self.optimizers.values():
            kind = type(optimizer).__name__
            if not isinstance(optimizer, torch.optim.Optimizer) or kind not in BY_ELEMENT:
                raise RuntimeInputError(
                    f"{kind} cannot step in the backward pass: each parameter is updated as soon as its own gradient "
                    f"is final; use one of torch.optim.{', '.join(BY_ELEMENT)}, or step after the backward pass"
                )
        self._parameters, self._take = dict(parameters), take
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autopar-update")
        self._running: list[Future[None]] = []
        self.is_last = False  # whether the backward pass that runs is the step's last
        for computed, name in early.items():
            private.hook_after_gradient(computed, partial(self._begin, name))

    def _begin(self, name: str, _: torch.Tensor) -> None:
        """Start the update of an early parameter."""
        parameter = self._parameters[name]
        if not self.is_last or has_hooks(parameter):
            return
        self._take(name)
        show_gradient(parameter, in_stages=False)
        self._running.append(self._thread.submit(self._update, name))

    def _update(self, name: str) -> None:
        optimizer = self.optimizers[name]
        optimizer.step()
        optimizer.zero_grad()

    def wait(self) -> None:
        """Wait for the early updates. Until they end, their gradients belong to their thread."""
        running, self._running, self.is_last = self._running, [], False
        for task in running:
            task.result()

    def update_late(self) -> None:
        """Update the late parameters."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and name in self.optimizers:
                self._update(name)
