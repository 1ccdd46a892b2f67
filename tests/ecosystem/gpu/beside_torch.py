"""Libraries that need a GPU, on torch's FSDP2 and on ours.

accelerate with transformers' Trainer, torchtitan's debug model, torchao's float8 and its optimizer on the host, and
torch's context parallelism.

    PYTHONPATH=. python tests/ecosystem/gpu/beside_torch.py libs.tar.xz result.json

Two NCCL ranks share the GPU. Losses and weights are compared bit for bit. ``--device cpu`` tries the script itself,
with gloo and the libraries that are installed (no archive: ``-``).
"""

import argparse
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from unittest import mock

# What torchtitan and torchao import and this script does not use; it is not in the archive. transformers looks whether
# they are there, and would use them.
ABSENT = ("datasets", "wandb", "tensorboard", "PIL", "torchvision", "tomli")
LIBRARIES = {
    "trainer": ("accelerate", "transformers"),
    "torchtitan": ("torchtitan",),
    "float8": ("torchao",),
    "float8_gathers": ("torchao",),
    "host_optimizer": ("torchao",),
    "context_parallel": (),
}


# --- one rank ---------------------------------------------------------------------------------------------------------


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for libraries that are imported and not used."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name, __spec__=spec, __path__=[], __file__=spec.name)
        module.__name__ = spec.name
        return module

    def exec_module(self, module):
        pass


def run_rank(case: str, side: str, device: str, file: str) -> None:
    rank = int(os.environ["RANK"])
    # NCCL takes two ranks on one GPU for a mistake, unless each claims a host of its own.
    os.environ.update(NCCL_HOSTID=f"node{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ.update(NCCL_MNNVL_ENABLE="0", NCCL_MAX_CTAS="4", LOCAL_RANK="0")
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if side == "shardwise":
        import shardwise

        shardwise.install()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    cases = {
        "trainer": trainer,
        "torchtitan": torchtitan,
        "host_optimizer": host_optimizer,
        "context_parallel": context_parallel,
    }
    losses, model = cases.get(case, float8)(case, rank, device)
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(name.encode())
        digest.update(full.detach().float().cpu().numpy().tobytes())
    classes = sorted({type(module).__mro__[1].__module__.partition(".")[0] for module in model.modules()})
    Path(f"{file}.{rank}").write_text(
        json.dumps({"losses": losses, "weights": digest.hexdigest(), "bases": classes})
    )
    dist.barrier()
    dist.destroy_process_group()


def trainer(case, rank, device):
    """A small Llama in bfloat16, by transformers' Trainer on accelerate."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    rows = torch.randint(0, 1024, (64, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    if device == "cpu":
        from tests.ecosystem.programs.fsdp_on_cpu import allow_fsdp_on_cpu

        allow_fsdp_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "reshard_after_forward": True,
            },
            bf16=True,
            use_cpu=device == "cpu",
            max_steps=8,
            per_device_train_batch_size=4,
            max_grad_norm=0.5,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=3,
        )
        run = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
        run.train()
    history = run.state.log_history
    return [[entry["loss"], entry["grad_norm"]] for entry in history if "loss" in entry], run.model


def torchtitan(case, rank, device):
    """torchtitan's llama3 debug model, sharded by torchtitan, in bfloat16."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp, disable_fsdp_gradient_division
    from torchtitan.models.llama3.model.model import Transformer

    with torch.device("meta"):
        model = Transformer(llama3_args["debugmodel"])
    apply_fsdp(model, init_device_mesh(device, (2,)), torch.bfloat16, torch.float32, pp_enabled=False)
    disable_fsdp_gradient_division(model)
    if device == "cpu":
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    return steps(model, rank, device, lambda model, tokens: model(tokens), tokens=2048), model


def float8(case, rank, device):
    """torchao's float8 training, with and without gathers in float8."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    gathers = case == "float8_gathers"
    model = language(device)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=device == "cpu")
    convert_to_float8_training(model, config=config)
    shard(model)

    def scales():
        if gathers:
            precompute_float8_dynamic_scale_for_fsdp(model)

    return steps(
        model, rank, device, lambda model, tokens: model(tokens), tokens=1024, after_step=scales
    ), model


def host_optimizer(case, rank, device):
    """torchao's optimizer that keeps its states on the host.

    With ``offload_gradients`` it raises on torch's FSDP2.
    """
    import torch
    from torchao.optim import CPUOffloadOptimizer

    model = language(device)
    shard(model)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return steps(
        model, rank, device, lambda model, tokens: model(tokens), tokens=1024, optimizer=optimizer
    ), model


def context_parallel(case, rank, device):
    """Each rank has half of every sequence; torch's ring attention, over the mesh that also shards the model."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import cross_entropy, scaled_dot_product_attention

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(256, 768, bias=False), nn.Linear(256, 256, bias=False)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    blocks = [Attention() for _ in range(3)]
    model = nn.Sequential(nn.Embedding(1024, 256), *blocks, nn.Linear(256, 1024)).to(device, torch.bfloat16)
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("cp",))
    shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(6):
        seed = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 1024, (2, 257), generator=seed).to(device)
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        options = {"buffers": [tokens, targets], "buffer_seq_dims": [1, 1]}
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, no_restore_buffers={tokens, targets}, **options),
        ):
            loss = cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def language(device):
    from torch import nn

    blocks = [nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(1024, 256), *blocks, nn.Linear(256, 1024)).to(device)


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model[1:-1]:
        fully_shard(block, **options)
    fully_shard(model, **options)


def steps(model, rank, device, forward, *, tokens, after_step=lambda: None, optimizer=None):
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(8):
        seed = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randint(0, tokens, (4, 128), generator=seed).to(device)
        loss = cross_entropy(forward(model, batch).float().flatten(0, 1), batch.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        losses.append(loss.item())
    return losses


# --- both sides -------------------------------------------------------------------------------------------------------


def compare(case: str, device: str, environment: dict[str, str]) -> dict[str, object]:
    """Runs a case on both sides, and says whether every number is the same."""
    found = {}
    started = time.perf_counter()
    for side in ("torch", "shardwise"):
        with tempfile.TemporaryDirectory() as folder:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            command = [*launch, __file__, "--rank", case, side, "--device", device, "-", f"{folder}/found"]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                return {"same": False, "side": side, "error": (done.stdout + done.stderr)[-4000:]}
            found[side] = [json.loads(Path(f"{folder}/found.{rank}").read_text()) for rank in range(2)]
    bases = {side: ranks[0].pop("bases") for side, ranks in found.items()}
    for ranks in found.values():
        ranks[1].pop("bases")
    return {
        "same": found["torch"] == found["shardwise"],
        "losses": found["shardwise"][0]["losses"],
        "losses_of_torch": found["torch"][0]["losses"],
        "sharded_by_ours": "shardwise" in bases["shardwise"] and "shardwise" not in bases["torch"],
        "versions": {library: _version(library, environment) for library in LIBRARIES[case]},
        "seconds": round(time.perf_counter() - started, 1),
    }


def _version(library: str, environment: dict[str, str]) -> str:
    sys.path[:0] = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    return version(library)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", nargs=2, metavar=("CASE", "SIDE"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=list(LIBRARIES))
    parser.add_argument("archive")
    parser.add_argument("result")
    options = parser.parse_args()
    if options.rank:
        if options.rank[0] != "trainer":
            sys.meta_path.append(_Absent())
        run_rank(*options.rank, options.device, options.result)
        return
    import torch

    with tempfile.TemporaryDirectory() as folder:
        if options.archive != "-":
            with tarfile.open(options.archive) as archive:
                archive.extractall(folder, filter="data")
        repository = str(Path(__file__).resolve().parents[3])
        paths = [folder, repository, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        today = datetime.now(timezone.utc).date().isoformat()
        found = {case: {**compare(case, options.device, environment), "date": today} for case in options.only}
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    results = {"torch": torch.__version__, "device": device, "ranks": 2, "cases": found}
    Path(options.result).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({case: entry["same"] for case, entry in found.items()}))
    for entry in found.values():
        print(entry.get("error", ""))


if __name__ == "__main__":
    main()
