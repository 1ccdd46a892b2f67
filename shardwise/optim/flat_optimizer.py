"""``flat``: a torch optimizer that steps a unit's shards as one tensor.

It *is* an optimizer of the given class, over the very parameters it was given: groups, schedulers, scalers, hooks and
state dicts see nothing else. Only while it steps are parameters and their state exchanged for runs of them.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.engine.step.optimizer_hooks import optimizer_zeroed
from shardwise.engine.unit.membership import membership, units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import StateError
from shardwise.optim.cache_blocks import BlockedStep
from shardwise.optim.elementwise_classes import check_elementwise, is_torchs_own
from shardwise.optim.flat_runs import FlatRun, States, make_runs
from shardwise.optim.in_backward import ArrivedGradients, BackwardSteps
from shardwise.torch_internals import local_of, zero_all


def flat(
    model_or_params: nn.Module | Iterable[Any],
    optimizer_class: type[Optimizer],
    *,
    in_backward: bool = False,
    **options: Any,
) -> Optimizer:
    """An optimizer of ``optimizer_class`` that steps each unit's shards as one tensor.

    Results are those of ``optimizer_class(params, **options)``: to the bit for torch's classes, but for roundings at a
    parameter's end by CPU kernels that are fused or for floats shorter than float32. So is the state dict: per
    parameter, for ``torch.save``, for ``get_optimizer_state_dict``, and for loading into either kind.

    Args:
        model_or_params: a model, all of whose parameters are taken, or what any torch optimizer takes: parameters,
            or dicts of parameters with options of their own. What shardwise did not shard is stepped one by one.
        optimizer_class: an optimizer that treats every element by itself, such as ``torch.optim.AdamW``.
        in_backward: step units whose shards are on the host as soon as their gradients have arrived, in a thread,
            while backward goes on; ``step()`` waits for them and takes the rest. From the second step on. Nothing may
            change gradients between backward and ``step()``: no clipping, no scaler.
        options: its arguments, e.g. ``lr=1e-3, fused=True``.
    """
    check_elementwise(optimizer_class)
    params: Any = model_or_params
    if isinstance(model_or_params, nn.Module):
        params = _sharded_parameters(model_or_params)
    made: Any = _flat_class(optimizer_class)(params, **options)  # type: ignore[arg-type]
    if in_backward:
        made._early = BackwardSteps(made._step_early)
    flat_optimizer: Optimizer = made
    return flat_optimizer


def _sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The model's parameters in their sharded form, also where the full ones are shown at the moment."""
    sharded = {
        slot.unsharded: slot.sharded
        for module in model.modules()
        for unit in units_of(module)
        for slot in unit.slots
    }
    return list(dict.fromkeys(sharded.get(param, param) for param in model.parameters()))


class FlatOptimizer(Optimizer):
    """The part of a flat optimizer that is the same whatever its class."""

    _runs: list[list[FlatRun]] | None = None
    _run_states: States
    _in_blocks: BlockedStep | None = None
    _may_step_in_blocks = False
    _early: BackwardSteps | None = None
    _runs_of_unit: dict[Unit, list[tuple[int, FlatRun]]]

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            runs = self._runs_to_step(self._finish_early())
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
            self._show(run for of_group in runs for run in of_group)
        return loss

    def _show(self, stepped: Iterable[FlatRun]) -> None:
        """Lets everybody see what a step has done to runs."""
        params = []
        for run in stepped:
            run.show_state(self.state, self._run_states)
            params += [member.param for member in run.members]
        # A run is other tensors over the parameters' memory: to whoever asks, the parameters have changed.
        increment_version(params)

    def _step_of_class(self, **kwargs: Any) -> None:
        step = super().step
        if getattr(step, "hooked", False):
            # torch has put step hooks around it; those of this optimizer run around its own step.
            step.__func__.__wrapped__(self, **kwargs)  # type: ignore[attr-defined]
        else:
            step(**kwargs)

    def _runs_to_step(self, stepped_already: set[FlatRun]) -> list[list[FlatRun]]:
        """The runs that have a gradient, which lies in its place, and were not stepped with it."""
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
            if any(_some_are_missing(gradients) for _, gradients in with_gradients):
                split = self._split(with_gradients)
                self._runs[number] = [run for run in runs if run in stepped_already] + split
                with_gradients = [(run, run.local_gradients()) for run in split]
                self._listen()
            ready.append([])
            for run, gradients in with_gradients:
                if gradients[0] is not None:
                    run.take(gradients)  # type: ignore[arg-type]
                    ready[-1].append(run)
        return ready

    def _make_runs(self) -> None:
        """Makes runs anew, out of the state as it is per parameter."""
        self._follow_replaced_parameters()
        self._run_states = defaultdict(dict)
        self._runs = []
        self._in_blocks = BlockedStep(self, self._step_of_class) if self._may_step_in_blocks else None
        for group in self.param_groups:
            # Without eps an optimizer divides zero by zero where there is padding.
            runs = make_runs(group["params"], self.state, bridges_padding=group.get("eps", 1.0) != 0)
            for run in runs:
                run.adopt_state(self.state, self._run_states)
            self._runs.append(runs)
        self._listen()

    # --- in backward ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Has units tell when their gradients are in place."""
        if self._early is None or self._runs is None:
            return
        told = weakref.WeakMethod(self._gradients_arrived)
        self._runs_of_unit = {}
        for number, runs in enumerate(self._runs):
            for run in runs:
                unit = run.members[0].unit
                if unit is not None and run.tensor.device.type == "cpu":
                    self._runs_of_unit.setdefault(unit, []).append((number, run))
        for unit in self._runs_of_unit:
            unit.gradients.settings.listener = partial(_tell, told, weakref.ref(unit))

    def _gradients_arrived(self, unit: Unit, wait: Callable[[], None]) -> None:
        assert self._early is not None
        ready: list[tuple[int, FlatRun, list[torch.Tensor]]] = []
        for number, run in self._runs_of_unit.get(unit, ()):
            gradients = [gradient for gradient in run.local_gradients() if gradient is not None]
            if len(gradients) == len(run.members) and run.holds(self.state):
                ready.append((number, run, gradients))
        if ready:
            options = [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ]
            self._early.hand_over(unit, ArrivedGradients(wait, ready, options))

    def _step_early(self, arrived: ArrivedGradients) -> None:
        """Steps runs in the thread for that: with an optimizer of its own that shares the runs' state."""
        for _, run, gradients in arrived.runs:
            run.take(gradients)
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

    def _finish_early(self) -> set[FlatRun]:
        """Waits for what is being stepped in backward, and shows it."""
        if self._early is None:
            return set()
        stepped = self._early.join()
        self._show(stepped)
        return stepped

    # --- the rest of an optimizer ---------------------------------------------------------------------------------

    def _split(self, with_gradients: list[tuple[FlatRun, list[torch.Tensor | None]]]) -> list[FlatRun]:
        """Runs that are all there or not at all in this step; parameters without a gradient must not move."""
        runs: list[FlatRun] = []
        for run, gradients in with_gradients:
            if not _some_are_missing(gradients):
                runs.append(run)
                continue
            parts = run.split([gradient is not None for gradient in gradients])
            self._run_states.pop(run.tensor, None)
            for part in parts:
                part.adopt_state(self.state, self._run_states)
            runs += parts
        return runs

    def _follow_replaced_parameters(self) -> None:
        """Goes on with the parameters that took the place of ours: ``load_state_dict(assign=True)`` brings new ones."""
        held = {param for group in self.param_groups for param in group["params"]}
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                found = membership(param)
                if found is None or found[1].sharded in held or not isinstance(found[1].sharded, DTensor):
                    continue
                follower = found[1].sharded
                group["params"][index] = follower
                if param in self.state:
                    self.state[follower] = self.state.pop(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._finish_early()
        if set_to_none:
            super().zero_grad()
            return
        # torch would fill DTensors one by one, and refuses to fill those and others together.
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
        """Per parameter, with counts of its own for each: whoever loads it may step parameters one by one."""
        if self._early is not None:
            self._early.wait()
        saved = super().state_dict()
        saved["state"] = {
            index: {
                key: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
                for key, value in values.items()
            }
            for index, values in saved["state"].items()
        }
        return saved

    # What changes parameters or their state from outside goes through one of these.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._runs = None
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._runs = None
        super().__setstate__(state)


def _tell(
    told: weakref.WeakMethod[Callable[..., None]], unit: weakref.ref[Unit], wait: Callable[[], None]
) -> None:
    """A unit's listener, which keeps nobody's optimizer alive."""
    gradients_arrived, itself = told(), unit()
    if gradients_arrived is not None and itself is not None:
        gradients_arrived(itself, wait)


def _some_are_missing(gradients: list[torch.Tensor | None]) -> bool:
    num_missing = sum(gradient is None for gradient in gradients)
    return 0 < num_missing < len(gradients)


@functools.cache
def _flat_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    made = type(f"Flat{optimizer_class.__name__}", (FlatOptimizer, optimizer_class), {"__module__": __name__})
    made._may_step_in_blocks = is_torchs_own(optimizer_class)  # type: ignore[attr-defined]
    # torch does this when the first one is made, which ranks that are threads might do at the same time.
    made.step = Optimizer.profile_hook_step(FlatOptimizer.step)  # type: ignore[attr-defined]
    made.step.hooked = True  # type: ignore[attr-defined]
    return made
