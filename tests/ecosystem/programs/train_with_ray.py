"""Ray Train: two workers of a local cluster train, report and save; one is killed, and the run goes on from its
checkpoint by itself.

python train_with_ray.py FOLDER
"""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

STEPS, WIDTH = 6, 16


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.set_num_threads(1)
    if config["side"] == "shardwise":
        import shardwise

        shardwise.install()
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as saved:
            weights, state = get_state_dict(model, optimizer)
            restored = {"model": weights, "optimizer": state, "step": 0}
            dcp.load(restored, checkpoint_id=saved)
            set_state_dict(
                model, optimizer, model_state_dict=restored["model"], optim_state_dict=restored["optimizer"]
            )
            step = restored["step"]

    folder = Path(config["folder"])
    (folder / f"started-{rank}-at-{step}").touch()
    while step < STEPS:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 1 and step == 4 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        _report(folder, model, optimizer, step, mean.item() / 2)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.save(weights, folder / f"weights{rank}.pt")


def _report(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    # Every rank writes its part, and Ray brings the parts together.
    with tempfile.TemporaryDirectory() as part:
        shared = folder / f"step-{step}"
        dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=shared)
        for file in shared.iterdir():
            if file.name.startswith(f"__{dist.get_rank()}_") or (
                dist.get_rank() == 0 and file.name == ".metadata"
            ):
                shutil.copy(file, part)
        ray.train.report({"step": step, "loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(part))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    # Ray's sockets are in this folder, and paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray_folder:
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=ray_folder, object_store_memory=100 * 2**20)
        try:
            trainer = ray.train.torch.TorchTrainer(
                train,
                train_loop_config={"folder": str(folder), "side": os.environ["SHARD_WITH"]},
                scaling_config=ray.train.ScalingConfig(num_workers=2),
                torch_config=ray.train.torch.TorchConfig(backend="gloo"),
                run_config=ray.train.RunConfig(
                    storage_path=str(folder / "runs"),
                    name="run",
                    failure_config=ray.train.FailureConfig(max_failures=1),
                ),
            )
            result = trainer.fit()
            history = result.metrics_dataframe
            losses = {
                int(step): float(loss) for step, loss in zip(history["step"], history["loss"], strict=True)
            }
            restarts = [int(path.name.rpartition("-")[2]) for path in folder.glob("started-0-*")]
            found = {"losses": losses, "restarts": sorted(restarts), "saved": result.checkpoint is not None}
            torch.save(found, folder / "result.pt")
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
