"""``flat``: a torch optimizer that steps a unit's shards as one tensor.

It is a subclass of the given class, over the parameters it was given: groups, schedulers, scalers, hooks and state
dicts work as usual. Only inside ``step()`` are parameters and their state replaced by flat runs (`flat_runs`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.engine.step.agreement import optimizer_zeroed
from shardwise.engine.unit.membership import membership, units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import StateError
from shardwise.optim.cache_blocks import BlockedStep
from shardwise.optim.elementwise_classes import check_elementwise, is_torchs_own, rows_together
from shardwise.optim.flat_runs import FlatRun, States, make_runs
from shardwise.optim.in_backward import ArrivedGradients, BackwardSteps
from shardwise.optim.quantized_states import QuantizedStates, quantizes_state
from shardwise.torch_internals import local_of, zero_all


def flat(
    model_or_params: nn.Module | Iterable[Any],
    optimizer_class: type[Optimizer],
    *,
    in_backward: bool = False,
    **options: Any,
) -> Optimizer:
    """Returns an optimizer of ``optimizer_class`` that steps each unit's shards as one tensor.

    Results equal those of ``optimizer_class(params, **options)``, bitwise for torch's classes, except that fused CPU
    kernels, and CPU kernels for floats shorter than float32, may round differently at a parameter's end. The state dict
    is the same too: per parameter, for ``torch.save`` and ``get_optimizer_state_dict``, loadable into either kind.

    Args:
        model_or_params: a model, for all its parameters, or what any torch optimizer accepts: parameters, or dicts of
            parameters with options of their own. Parameters that shardwise did not shard are stepped one by one.
        optimizer_class: an element-wise optimizer, such as ``torch.optim.AdamW``; or one of torchao's that quantize
            their state in blocks: of them only neighbours are joined whose blocks stay the same.
        in_backward: from the second step on, step units whose shards are on the host in a thread, as soon as their
            gradients have arrived, while backward goes on; ``step()`` waits for them and steps the rest. Nothing may
            change gradients between backward and ``step()``: no clipping, no scaler.
        options: arguments of the class, e.g. ``lr=1e-3, fused=True``.
    """
    check_elementwise(optimizer_class)
    params: Any = model_or_params
    if isinstance(model_or_params, nn.Module):
        params = sharded_parameters(model_or_params)
    made: Any = _flat_class(optimizer_class)(params, **options)  # type: ignore[arg-type]
    if in_backward:
        made._backward_steps = BackwardSteps(made._step_in_thread)
    flat_optimizer: Optimizer = made
    return flat_optimizer


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the model's parameters in sharded form, even while the model is unsharded."""
    sharded = {
        slot.unsharded: slot.sharded
        for module in model.modules()
        for unit in units_of(module)
        for slot in unit.slots
    }
    return list(dict.fromkeys(sharded.get(param, param) for param in model.parameters()))


def banded(params: Iterable[Any], optimizer_class: type[Optimizer], **options: Any) -> Optimizer:
    """Returns an optimizer that steps each shard of whole rows as a matrix of its own, one by one."""
    made: Any = _flat_class(optimizer_class)(params, **options)  # type: ignore[arg-type]
    made._rows_together = rows_together(optimizer_class)
    banded_optimizer: Optimizer = made
    return banded_optimizer


class FlatOptimizer(Optimizer):
    """The base of all flat optimizers; `_flat_class` combines it with the user's class."""

    _runs: list[list[FlatRun]] | None = None
    _run_states: States
    _in_blocks: BlockedStep | None = None
    _may_step_in_blocks = False
    _quantizes_state = False
    _quantized: QuantizedStates | None = None
    _backward_steps: BackwardSteps | None = None
    _runs_of_unit: dict[Unit, list[tuple[int, FlatRun]]]
    # For a class that is not element-wise, but steps bands of so many rows: parameters are stepped one by one.
    _rows_together: int | None = None

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            runs = self._runs_to_step(self._join_backward_steps())
            groups, states = self.param_groups, self.state
            params = [group["params"] for group in groups]
            self.state = self._run_states  # type: ignore[assignment]
            try:
                for group, of_group in zip(groups, runs, strict=True):
                    group["params"] = [run.tensor for run in of_group]
                (self._in_blocks or self._step_of_class)(**kwargs)
            finally:
                self.state = states
                for group, own in zip(groups, params, strict=True):
                    group["params"] = own
                for of_group in runs:
                    for run in of_group:
                        run.drop_gradient()
            self._publish(run for of_group in runs for run in of_group)
        return loss

    def _publish(self, stepped: Iterable[FlatRun]) -> None:
        """Puts new state of stepped runs into ``state``, and marks their parameters as modified."""
        params = []
        for run in stepped:
            run.publish_state(self.state, self._run_states)
            params += [member.param for member in run.members]
        # The step wrote through other tensors over the same memory, which autograd does not see.
        increment_version(params)

    def _step_of_class(self, **kwargs: Any) -> None:
        step = super().step
        if getattr(step, "hooked", False):
            # torch wrapped it to run step hooks; this optimizer's own step runs them already.
            step.__func__.__wrapped__(self, **kwargs)  # type: ignore[attr-defined]
        else:
            step(**kwargs)

    def _runs_to_step(self, stepped_already: set[FlatRun]) -> list[list[FlatRun]]:
        """Gives runs their gradients and returns, for each group, those that have one and were not stepped yet."""
        if self._runs is None or not all(run.holds(self.state) for runs in self._runs for run in runs):
            if stepped_already:
                raise StateError(
                    "parameters or their state were replaced after some of them had been stepped in backward",
                    where="flat(..., in_backward=True)",
                    fix="replace them after step(), or use flat without in_backward",
                )
            self._make_runs()
        assert self._runs is not None
        ready: list[list[FlatRun]] = []
        for number, runs in enumerate(self._runs):
            with_gradients = [(run, run.local_gradients()) for run in runs if run not in stepped_already]
            if any(_is_partial(gradients) for _, gradients in with_gradients):
                split = self._split(with_gradients)
                self._runs[number] = [run for run in runs if run in stepped_already] + split
                with_gradients = [(run, run.local_gradients()) for run in split]
                self._register_listeners()
            ready.append([])
            for run, gradients in with_gradients:
                if gradients[0] is not None:
                    run.set_gradient(gradients)  # type: ignore[arg-type]
                    ready[-1].append(run)
        return ready

    def _make_runs(self) -> None:
        """Makes all runs from the per-parameter state."""
        self._adopt_replaced_parameters()
        self._run_states = defaultdict(dict)
        self._runs = []
        self._in_blocks = BlockedStep(self, self._step_of_class) if self._may_step_in_blocks else None
        self._quantized = QuantizedStates(self) if self._quantizes_state else None
        for group in self.param_groups:
            # Without eps, an optimizer would divide zero by zero in the padding; blocks would begin in it.
            bridges_padding = group.get("eps", 1.0) != 0 and self._quantized is None
            runs = make_runs(
                group["params"], self.state, bridges_padding, self._rows_together, self._quantized
            )
            for run in runs:
                run.adopt_state(self.state, self._run_states)
            self._runs.append(runs)
        self._register_listeners()

    # --- in backward ----------------------------------------------------------------------------------------------

    def _register_listeners(self) -> None:
        """Registers with units, so that they report when their gradients are reduced."""
        if self._backward_steps is None or self._runs is None:
            return
        self._runs_of_unit = {}
        for number, runs in enumerate(self._runs):
            for run in runs:
                unit = run.members[0].unit
                if unit is not None and run.tensor.device.type == "cpu":
                    self._runs_of_unit.setdefault(unit, []).append((number, run))
        for unit in self._runs_of_unit:
            unit.gradients.listen(self._gradients_arrived)

    def _gradients_arrived(self, unit: Unit, wait: Callable[[], None], is_last: bool) -> None:
        if not is_last:
            return
        assert self._backward_steps is not None
        ready: list[tuple[int, FlatRun, list[torch.Tensor]]] = []
        for number, run in self._runs_of_unit.get(unit, ()):
            gradients = [gradient for gradient in run.local_gradients() if gradient is not None]
            if len(gradients) == len(run.members) and run.holds(self.state):
                ready.append((number, run, gradients))
        if ready:
            options = [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ]
            self._backward_steps.submit(unit, ArrivedGradients(wait, ready, options))

    def _step_in_thread(self, arrived: ArrivedGradients) -> None:
        """Steps runs, in the thread, with a copy of this optimizer that shares the runs' state."""
        for _, run, gradients in arrived.runs:
            run.set_gradient(gradients)
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.state = self._run_states  # type: ignore[assignment]
        twin.param_groups = [
            {**options, "params": [run.tensor for of, run, _ in arrived.runs if of == number]}
            for number, options in enumerate(arrived.options)
        ]
        try:
            FlatOptimizer._step_of_class(twin)
        finally:
            for _, run, _ in arrived.runs:
                run.drop_gradient()

    def _join_backward_steps(self) -> set[FlatRun]:
        """Waits for the steps taken in backward, publishes them and returns their runs."""
        if self._backward_steps is None:
            return set()
        stepped = self._backward_steps.join()
        self._publish(stepped)
        return stepped

    # --- the rest of an optimizer ---------------------------------------------------------------------------------

    def _split(self, with_gradients: list[tuple[FlatRun, list[torch.Tensor | None]]]) -> list[FlatRun]:
        """Splits runs of which some members have no gradient: those must not be stepped."""
        runs: list[FlatRun] = []
        for run, gradients in with_gradients:
            if not _is_partial(gradients):
                runs.append(run)
                continue
            parts = run.split([gradient is not None for gradient in gradients])
            self._run_states.pop(run.tensor, None)
            for part in parts:
                part.adopt_state(self.state, self._run_states)
            runs += parts
        return runs

    def _adopt_replaced_parameters(self) -> None:
        """Switches to parameters that replaced ours in their unit, as ``load_state_dict(assign=True)`` does."""
        held = {param for group in self.param_groups for param in group["params"]}
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                found = membership(param)
                if found is None or found[1].sharded in held or not isinstance(found[1].sharded, DTensor):
                    continue
                replacement = found[1].sharded
                group["params"][index] = replacement
                if param in self.state:
                    self.state[replacement] = self.state.pop(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._join_backward_steps()
        if set_to_none:
            super().zero_grad()
            return
        # torch would zero DTensors one by one, and refuses to zero them together with plain tensors.
        by_dtype: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if (gradient := param.grad) is not None:
                    if gradient.grad_fn is not None:
                        gradient.detach_()
                    gradient.requires_grad_(False)
                    part = local_of(gradient) if isinstance(gradient, DTensor) else gradient
                    by_dtype.setdefault((part.device, part.dtype), []).append(part)
        for gradients in by_dtype.values():
            zero_all(gradients)
        optimizer_zeroed(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the class. Members of a run share step counts; here each parameter gets its own."""
        if self._backward_steps is not None:
            self._backward_steps.wait()
        saved = super().state_dict()
        saved["state"] = {
            index: {
                key: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
                for key, value in values.items()
            }
            for index, values in saved["state"].items()
        }
        return saved

    # Parameters and state are changed from outside through these; load_state_dict() calls __setstate__.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._runs = None
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._runs = None
        super().__setstate__(state)


def _is_partial(gradients: list[torch.Tensor | None]) -> bool:
    num_missing = sum(gradient is None for gradient in gradients)
    return 0 < num_missing < len(gradients)


@functools.cache
def _flat_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    made = type(f"Flat{optimizer_class.__name__}", (FlatOptimizer, optimizer_class), {"__module__": __name__})
    made._may_step_in_blocks = is_torchs_own(optimizer_class)  # type: ignore[attr-defined]
    made._quantizes_state = quantizes_state(optimizer_class)  # type: ignore[attr-defined]
    # torch does this in the first constructor call, where ranks that are threads would race.
    made.step = Optimizer.profile_hook_step(FlatOptimizer.step)  # type: ignore[attr-defined]
    made.step.hooked = True  # type: ignore[attr-defined]
    return made
