"""A bound for rounding errors that holds whatever instructions computed the result.

A kernel takes a tensor vector by vector and finishes its end element by element. Where the processor has an instruction
for it, compilers fuse a product with the sum that follows, sometimes in only one of the two loops. So an element's bits
depend on where in the tensor it lies, on the processor and on the build of torch. What does not depend on them: each
operation rounds its result once, by at most half an ulp, or not at all where it is fused with the next.

`Rounded` carries this through a formula: a value in float64, and the largest error that such roundings can add up to.
Each operation propagates the errors of its operands and adds its own rounding. Any evaluation of the formula therefore
lies within `error` of `value`, and two evaluations lie within twice that of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

# Half an ulp of a float32, relative. A little more than that, for the roundings of float64 in here.
_HALF_ULP = 2.0**-24 * (1 + 2.0**-10)
# Below the normal numbers an error is absolute.
_SMALLEST = 2.0**-149


class Rounded:
    """A number known up to the roundings of the float32 operations that led to it."""

    def __init__(self, value: Tensor | float, error: Tensor | float = 0.0) -> None:
        self.value = torch.as_tensor(value, dtype=torch.float64)
        self.error = torch.as_tensor(error, dtype=torch.float64)

    @staticmethod
    def constant(number: float) -> Rounded:
        """A setting such as a learning rate, which is rounded when it becomes a float32."""
        return Rounded._after(torch.tensor(number, dtype=torch.float64), torch.zeros(()))

    @staticmethod
    def _after(value: Tensor, error: Tensor) -> Rounded:
        return Rounded(value, error + _HALF_ULP * (value.abs() + error) + _SMALLEST)

    def __add__(self, other: Rounded) -> Rounded:
        return self._after(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self._after(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Rounded) -> Rounded:
        passed_on = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return self._after(self.value * other.value, passed_on)

    def __truediv__(self, other: Rounded) -> Rounded:
        quotient = self.value / other.value
        passed_on = (self.error + quotient.abs() * other.error) / (other.value.abs() - other.error)
        return self._after(quotient, passed_on)

    def sqrt(self) -> Rounded:
        root = self.value.sqrt()
        # |sqrt(a) - sqrt(b)| = |a - b| / (sqrt(a) + sqrt(b)), and sqrt(b) may be 0.
        passed_on = torch.where(self.error == 0, 0.0, self.error / root.clamp_min(_SMALLEST))
        return self._after(root, torch.minimum(passed_on, self.error.sqrt()))

    def maximum(self, other: Rounded) -> Rounded:
        return Rounded(torch.maximum(self.value, other.value), torch.maximum(self.error, other.error))

    def holds(self, computed: Tensor) -> bool:
        """Whether a float32 tensor can have come of this formula."""
        return bool(((computed.double() - self.value).abs() <= self.error).all())


# --- one step of an optimizer, in the operations that torch's kernels are made of -------------------------------------

State = dict[str, Rounded]
Step = Callable[[Rounded, Rounded, State, int, dict[str, Any]], tuple[Rounded, State]]


def _sgd(param: Rounded, grad: Rounded, state: State, step: int, options: dict[str, Any]) -> Any:
    assert not any(options[name] for name in ("weight_decay", "dampening", "nesterov")), "not written down"
    number = Rounded.constant
    momentum = state.get("momentum_buffer")
    momentum = grad if momentum is None else number(options["momentum"]) * momentum + grad
    return param - number(options["lr"]) * momentum, {"momentum_buffer": momentum}


def _adagrad(param: Rounded, grad: Rounded, state: State, step: int, options: dict[str, Any]) -> Any:
    assert not options["weight_decay"], "not written down"
    number = Rounded.constant
    total = state["sum"] + grad * grad
    rate = number(options["lr"] / (1 + (step - 1) * options["lr_decay"]))
    return param - rate * grad / (total.sqrt() + number(options["eps"])), {"sum": total}


def _adam(param: Rounded, grad: Rounded, state: State, step: int, options: dict[str, Any]) -> Any:
    number = Rounded.constant
    lr, decay, (beta1, beta2) = options["lr"], options["weight_decay"], options["betas"]
    if options["decoupled_weight_decay"]:
        # Kernels that subtract lr * decay * param instead round by less.
        param = number(1 - lr * decay) * param
    elif decay:
        grad = grad + number(decay) * param
    zero = Rounded(torch.zeros_like(grad.value))
    average, squares = state.get("exp_avg", zero), state.get("exp_avg_sq", zero)
    average = average + number(1 - beta1) * (grad - average)
    squares = number(beta2) * squares + number(1 - beta2) * grad * grad
    made = {"exp_avg": average, "exp_avg_sq": squares}
    if options["amsgrad"]:
        squares = made["max_exp_avg_sq"] = squares.maximum(state.get("max_exp_avg_sq", zero))
    root = squares.sqrt() / number((1 - beta2**step) ** 0.5)
    size = number(lr / (1 - beta1**step))
    return param - size * average / (root + number(options["eps"])), made


_STEPS: dict[type[optim.Optimizer], Step] = {
    optim.SGD: _sgd,
    optim.Adagrad: _adagrad,
    optim.Adam: _adam,
    optim.AdamW: _adam,
}


def stepped(
    kind: type[optim.Optimizer],
    param: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    step: int,
    options: dict[str, Any],
) -> tuple[Rounded, State]:
    """What a step makes of a float32 parameter and its state, as they were before it; ``step`` counts from 1."""
    of_elements = {
        key: Rounded(value.detach())
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim()
    }
    return _STEPS[kind](Rounded(param.detach()), Rounded(grad), of_elements, step, options)
