"""Lightning: Fabric and Trainer, with ModelParallelStrategy and FSDPStrategy; train, accumulate, clip, save, resume."""

import contextlib
import os
import warnings

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import strategies as pytorch_strategies
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.tensor import DTensor

from tests.ecosystem.programs.cases import case, main

SIDE = os.environ.get("SHARD_WITH")
if SIDE == "import":
    # The program of a user who imports ours and installs nothing.
    from shardwise import fully_shard
else:
    from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
WIDTH = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        return self.blocks(self.first(x))


def parallelize(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def batches(rank, count=6):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def allow_fsdp_on_cpu():
    """Patches what Lightning asks of FSDP: it names the device by an index, which a CPU has not."""
    original = FullyShardedDataParallel.__init__

    def init(self, *arguments, **options):
        if options.get("device_id", 0) is None:
            options["device_id"] = torch.device("cpu")
        original(self, *arguments, **options)

    FullyShardedDataParallel.__init__ = init
    # torch's wrapper frees full parameters that it "moves" from the CPU to the CPU, and reads them after that.
    FlatParamHandle.to_cpu = lambda handle: contextlib.nullcontext()


class OnCpu(FSDPStrategy):
    """Lightning refuses its FSDPStrategy itself on a CPU, and its subclasses nowhere."""


class TrainerOnCpu(pytorch_strategies.FSDPStrategy):
    """As above."""


def is_left_out(kind, saves):
    """Torch's wrapper does not resume from full state dicts on a CPU; and to import ours is about `fully_shard`."""
    return kind == "fsdp" and (SIDE == "import" or (SIDE == "torch" and saves == "full"))


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def fabric_strategy(kind, saves):
    if kind == "parallel":
        return ModelParallelStrategy(
            parallelize,
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=saves == "sharded",
        )
    return OnCpu(auto_wrap_policy={nn.Sequential}, state_dict_type=saves)


@case("parallel", "sharded")
@case("parallel", "full")
@case("fsdp", "full")
@case("fsdp", "sharded")
def fabric(folder, kind, saves):
    if is_left_out(kind, saves):
        return None
    fabric = Fabric(accelerator="cpu", devices=2, strategy=fabric_strategy(kind, saves))
    fabric.launch()

    def begin():
        torch.manual_seed(0)
        model = fabric.setup_module(Model())
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False))

    def train(model, optimizer, data):
        found = []
        for index, x in enumerate(data):
            accumulates = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = model(x).square().mean()
                fabric.backward(loss)
            found.append(loss.detach())
            if accumulates:
                # Torch's wrapper shows gradients that are not reduced; FSDP2 shows none.
                found.append(
                    [param.grad is None for param in model.parameters()] if kind == "parallel" else None
                )
                continue
            found += [full(param.grad).clone() for param in model.parameters() if kind == "parallel"]
            optimizer.step()
            optimizer.zero_grad()
        return found

    data = batches(fabric.global_rank)
    model, optimizer = begin()
    first = train(model, optimizer, data)
    fabric.save(folder / "state", {"model": model, "optimizer": optimizer, "step": 3})
    went_on = train(model, optimizer, data)
    model, optimizer = begin()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder / "state", state)
    resumed = train(model, optimizer, data)
    assert all(
        torch.equal(a, b) for a, b in zip(went_on, resumed, strict=True) if isinstance(a, torch.Tensor)
    )
    return {"first": first, "resumed": resumed, "step": state["step"]}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = None
        self.losses = []

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(0)
            self.model = Model()
            if isinstance(self.trainer.strategy, pytorch_strategies.ModelParallelStrategy):
                parallelize(self.model, self.device_mesh)

    def training_step(self, x):
        loss = self.model(x).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, foreach=False)


@case("parallel", "sharded")
@case("parallel", "full")
@case("fsdp", "full")
@case("fsdp", "sharded")
def trainer(folder, kind, saves):
    if is_left_out(kind, saves):
        return None

    def begin(epochs):
        strategy = (
            pytorch_strategies.ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=saves == "sharded"
            )
            if kind == "parallel"
            else TrainerOnCpu(auto_wrap_policy={nn.Sequential}, state_dict_type=saves)
        )
        return Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.01 if kind == "parallel" else None,
            default_root_dir=folder,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        )

    rank = int(os.environ["RANK"])
    data = torch.utils.data.DataLoader(batches(rank), batch_size=None)
    lightning.seed_everything(0, verbose=False)
    whole = Module()
    begin(2).fit(whole, data)
    half = Module()
    first = begin(1)
    first.fit(half, data)
    first.save_checkpoint(folder / "state.ckpt")
    resumed = Module()
    begin(2).fit(resumed, data, ckpt_path=folder / "state.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.losses[6:], resumed.losses, strict=True))
    return {"whole": whole.losses, "resumed": resumed.losses}


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    main()
