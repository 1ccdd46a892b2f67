"""``capture``: a whole training step as one CUDA graph, recorded once and then replayed with a single launch.

    calls    1, 2, 3             4                            5, 6, ...
             run eagerly         recorded, then replayed      replayed

The first calls warm up kernels, caches and optimizer state. Recording executes nothing: the recorded step is replayed
right after, so every call is exactly one step. Each call first checks what the recording depends on. Inputs of other
shapes run eagerly. If parameters were replaced, frozen or unfrozen, or an optimizer's options changed, the step is
recorded again. A step that cannot be recorded warns once and runs eagerly from then on.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.engine.step.graph_capture import (
    begin_replay,
    end_replay,
    is_unchanged,
    join_streams,
    recording,
    why_not_capturable,
)
from shardwise.engine.step.root import Root, collect_roots
from shardwise.engine.tensor_trees import map_tensors, tensors_in
from shardwise.errors import ShardwiseError
from shardwise.torch_internals import forget_capture, same_structure

_WARM_UP_CALLS = 3
# Code between the step and its user's line.
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__)


def capture(step: Callable[..., Any], *example_inputs: Any) -> CapturedStep:
    """Makes a training step of static shapes replay as one CUDA graph.

    Args:
        step: runs a whole step (forward, backward, clipping, optimizer, all micro-batches) and returns the loss, or any
            structure of tensors. It must not read values on the host (``loss.item()``, printing).
        example_inputs: inputs of the shapes and dtypes that it will be called with; their values do not matter.

    Returns:
        The function to call instead of ``step``. It returns new tensors each time. Optimizers are made capturable, with
        learning rates as tensors, if they can be; schedulers and code that sets ``group["lr"]`` keep working.
    """
    return CapturedStep(step, example_inputs)


class CapturedStep:
    """Returned by ``capture``: a step that is replayed if it can be."""

    def __init__(self, step: Callable[..., Any], example_inputs: tuple[Any, ...]) -> None:
        self._step = step
        self._shapes = _shapes(example_inputs)
        self._example = example_inputs
        self._calls_before_recording = _WARM_UP_CALLS
        self._recording: _Recording | None = None
        self._optimizers = CapturableOptimizers()
        self._roots: list[Root] = []
        self._has_warned_of_shapes = False
        self.reason: str | None = None
        """Why the step cannot be captured; None if it can."""
        if not torch.cuda.is_available():
            self._give_up("there is no CUDA device")
        elif any(tensor.device.type != "cuda" for tensor in tensors_in(example_inputs)):
            self._give_up("an input is not on a CUDA device")
        else:
            self._stream = torch.cuda.Stream()

    @property
    def is_captured(self) -> bool:
        return self._recording is not None

    def __call__(self, *inputs: Any) -> Any:
        if self.reason is not None:
            return self._step(*inputs)
        if _shapes(inputs) != self._shapes or not same_structure(inputs, self._example):
            self._warn_of_shapes()
            return self._run_eagerly(inputs)
        if self._recording is not None and not self._recording.is_valid(self._optimizers):
            # One eager step picks up the change; the next one is recorded.
            self._recording, self._calls_before_recording = None, 1
        if self._recording is None:
            if self._calls_before_recording > 0:
                self._calls_before_recording -= 1
                return self._run_eagerly(inputs)
            self._recording = self._record(inputs)
            if self._recording is None:
                return self._step(*inputs)
        return self._recording.replay(inputs)

    def _run_eagerly(self, inputs: tuple[Any, ...]) -> Any:
        """Runs an eager step, on the stream that will record: autograd remembers streams."""
        with self._optimizers.collect(), collect_roots(self._roots), _running_on(self._stream):
            result = self._step(*inputs)
        if self._recording is None:
            self._optimizers.make_capturable()
        return result

    def _record(self, inputs: tuple[Any, ...]) -> _Recording | None:
        for root in self._roots:
            if (obstacle := why_not_capturable(root)) is not None:
                self._give_up(obstacle)
                return None
        gradients = self._optimizers.gradients()
        try:
            return _Recording(self._step, inputs, self._stream, self._roots, self._optimizers)
        except ShardwiseError:
            raise
        except Exception as error:  # noqa: BLE001 - a step that cannot be recorded may still run eagerly
            self._give_up(_reason(error))
        # Nothing was executed, so parameters are unchanged. The Python state of the step is restored.
        torch.cuda.synchronize()
        for root in self._roots:
            root.reset()
        for param, gradient in gradients:
            param.grad = gradient
        return None

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(
            f"the training step is not captured and runs eagerly: {reason}", UserWarning, stacklevel=4
        )

    def _warn_of_shapes(self) -> None:
        if not self._has_warned_of_shapes:
            self._has_warned_of_shapes = True
            warnings.warn(
                "a captured step was called with inputs of other shapes than the example's; such steps run eagerly. "
                "Pad or drop the odd batch to have all steps replayed",
                UserWarning,
                stacklevel=3,
            )


class _Recording:
    """One recorded step, with the tensors that it reads and writes."""

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: tuple[Any, ...],
        stream: torch.cuda.Stream,
        roots: list[Root],
        optimizers: CapturableOptimizers,
    ) -> None:
        self._inputs = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        self._input_tensors = tensors_in(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        self._roots = roots
        with ExitStack() as stack:
            for root in roots:
                stack.enter_context(recording(root))
            stack.enter_context(_capturing(self._graph, stream))
            output = step(*self._inputs)
            for root in roots:
                join_streams(root)
        self._output = map_tensors(torch.Tensor.detach, output)
        self._options = optimizers.options()
        # alive: the gradients that a replay writes, for code after the step
        self._gradients = optimizers.gradients()

    def is_valid(self, optimizers: CapturableOptimizers) -> bool:
        """Whether nothing has changed that the recording depends on. Copies new learning rates to the device."""
        optimizers.update_learning_rates()
        return all(is_unchanged(root) for root in self._roots) and optimizers.options() == self._options

    def replay(self, inputs: tuple[Any, ...]) -> Any:
        """Runs the recorded step on ``inputs``; returns copies of its outputs."""
        for static, tensor in zip(self._input_tensors, tensors_in(inputs), strict=True):
            static.copy_(tensor, non_blocking=True)
        for root in self._roots:
            begin_replay(root)
        self._graph.replay()
        for param, gradient in self._gradients:
            param.grad = gradient
        for root in self._roots:
            end_replay(root)
        return map_tensors(torch.Tensor.clone, self._output)


def _shapes(inputs: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(inputs)]


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Records what runs inside. If that fails, torch is as it was before."""
    current, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    own_error: BaseException | None = None
    try:
        # "thread_local": other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                own_error = error
                raise
    except BaseException as error:  # noqa: BLE001 - raised below
        torch.cuda.set_stream(current)
        forget_capture(graph, pool)
        # What the step raised says more than that the capture could not be ended after it.
        raise own_error or error from None


def _reason(error: Exception) -> str:
    """What the step raised, and where in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    where = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}"


@contextmanager
def _running_on(stream: torch.cuda.Stream) -> Iterator[None]:
    # order: the caller's earlier work before the step, and the step before the caller's later work
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


# --- the optimizers of a captured step ------------------------------------------------------------------------------

Options = list[dict[str, Any]]


class CapturableOptimizers:
    """The optimizers that a step calls: collected as they step, made to read step counts and rates on the device."""

    def __init__(self) -> None:
        self._known: dict[int, Optimizer] = {}
        # Learning rates on the device, each with its parameter group.
        self._rates: list[tuple[dict[str, Any], torch.Tensor]] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects every optimizer that steps inside this context."""

        def add(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._known.setdefault(id(optimizer), optimizer)

        handle = register_optimizer_step_pre_hook(add)
        try:
            yield
        finally:
            handle.remove()

    def make_capturable(self) -> None:
        """Moves step counts and learning rates to the device, for optimizers that can read them there."""
        for optimizer in self._known.values():
            groups = optimizer.param_groups
            if any(group.get("capturable") is False for group in groups):
                for group in groups:
                    group["capturable"] = True
                # Loading its own state moves it to where a capturable optimizer needs it.
                optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups:
                if not isinstance(group.get("lr"), torch.Tensor) and _accepts_tensor_rate(group):
                    group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        self._rates = [
            (group, group["lr"])
            for optimizer in self._known.values()
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), torch.Tensor)
        ]

    def update_learning_rates(self) -> None:
        """Copies learning rates that were set as numbers since the last step to the tensors that replays read."""
        for group, rate in self._rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate

    def options(self) -> Options:
        """The options that a recording contains as constants: if they change, the step must be recorded again."""
        return [
            {
                key: value
                for key, value in group.items()
                if key != "params" and not isinstance(value, torch.Tensor)
            }
            for optimizer in self._known.values()
            for group in optimizer.param_groups
        ]

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each parameter with its current gradient."""
        return [
            (param, param.grad)
            for optimizer in self._known.values()
            for group in optimizer.param_groups
            for param in group["params"]
        ]


def _accepts_tensor_rate(group: dict[str, Any]) -> bool:
    """Whether the optimizer reads the learning rate on the device; others would copy it to the host."""
    on_device = all(param.device.type == "cuda" for param in group["params"])
    return "lr" in group and bool(group.get("capturable") or group.get("fused")) and on_device
