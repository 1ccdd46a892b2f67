"""torchao: low-precision weights and optimizers, whose tensor subclasses are sharded, gathered and stepped."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.ecosystem.programs.cases import case, main

WIDTH = 64
# torchao compiles its optimizers and quantizers, which takes minutes; here they run as they are, on both sides.
torch.compile = lambda function=None, **options: function if function is not None else (lambda inner: inner)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def sharded(model):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model, optimizer, after_step=lambda: None):
    found = []
    for step in range(4):
        x = torch.randn(
            32, WIDTH, generator=torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
        )
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        found.append(loss.detach().clone())
    return found


@case(False)
@case(True)
def float8(folder, gathers_in_float8):
    if gathers_in_float8 and os.environ["SHARD_WITH"] == "torch":
        # gloo has no float8, and torch gathers with its collectives.
        return None
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_in_float8, emulate=True)
    model = convert_to_float8_training(Model(), config=config)
    sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def after_step():
        if gathers_in_float8:
            precompute_float8_dynamic_scale_for_fsdp(model)

    return trained(model, optimizer, after_step)


class Block(nn.Module):
    """Weights whose shards have a quantized state; and some that do not, being too small, or not whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.wide = nn.Sequential(*[nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False) for _ in range(3)])
        self.odd = nn.Linear(2 * WIDTH, 2 * WIDTH + 3)
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)

    def forward(self, x):
        return self.down(self.odd(self.wide(self.norm(torch.cat([x, x.square()], 1)))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.layers(x)


@case("AdamW8bit", False)
@case("AdamW8bit", True)
@case("AdamW4bit", False)
@case("AdamW4bit", True)
def optimizer(folder, kind, is_flat):
    """With ``is_flat``, ours steps neighbours as one tensor; torch's side has nothing like it."""
    from torchao import optim

    def make(model):
        if is_flat and os.environ["SHARD_WITH"] == "shardwise":
            from shardwise.optim import flat

            return flat(model, getattr(optim, kind), lr=1e-2)
        return getattr(optim, kind)(model.parameters(), lr=1e-2)

    model = sharded(Blocks())
    low_bit = make(model)
    losses = trained(model, low_bit)
    file = folder / f"optimizer{os.environ['RANK']}.pt"
    torch.save(low_bit.state_dict(), file)
    again = make(model)
    again.load_state_dict(torch.load(file, weights_only=False))
    losses += trained(model, again)
    states = {number: plain(state) for number, state in again.state_dict()["state"].items()}
    assert sum(isinstance(state["exp_avg"], dict) for state in states.values()) >= 6
    return [losses, states]


def plain(state):
    """A parameter's state on this rank, without the classes of torchao."""
    return {
        name: {part: getattr(local, part) for part in ("codes", "scale")}
        if hasattr(local, "codes")
        else local
        for name, value in state.items()
        for local in [value.to_local() if hasattr(value, "to_local") else value]
    }


@case("int8_mixed_precision_training")
@case("int8_weight_only_quantized_training")
@case("bitnet_training")
def quantized(folder, kind):
    from torchao import optim
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    model = Model()
    quantize_(model.layers, getattr(quantized_training, kind)())
    sharded(model)
    # Its own AdamW: quantized weights have no operators that write in place.
    return trained(model, optim._AdamW(model.parameters(), lr=1e-2))


@case()
def nf4(folder):
    """QLoRA: frozen NF4 weights, trained adapters."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Adapted(nn.Module):
        def __init__(self, layer) -> None:
            super().__init__()
            self.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
            self.down = nn.Linear(WIDTH, 4, bias=False)
            self.up = nn.Linear(4, WIDTH, bias=False)

        def forward(self, x):
            return linear_nf4(x, self.weight) + self.up(self.down(x))

    model = Model()
    model.layers = nn.Sequential(*[Adapted(layer) for layer in model.layers])
    sharded(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    return trained(model, optimizer)


if __name__ == "__main__":
    main()
