"""Every optimizer of torch's that steps element by element, with options that use all of its kernels."""

from __future__ import annotations

from typing import Any

from torch import optim

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (optim.AdamW, {"lr": 1e-2, "maximize": True}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {"t0": 2}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Rprop": (optim.Rprop, {}),
}
