"""Rehearses training steps of a sharded model on meta devices, and returns their tape.

The model is built, sharded and run as in training, with the ranks of a mesh that does not exist. Nothing is
allocated, so a model of 70 billion parameters takes seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.comm.dry_run import rehearsing
from shardwise.composable.fully_shard import fully_shard
from shardwise.engine.unit.membership import units_of
from shardwise.engine.unit.module_selection import choose_modules, has_forward
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError
from shardwise.forecast.compiled import compiling_as_cuda
from shardwise.forecast.cuda_choices import choosing_as_cuda
from shardwise.forecast.dry_mesh import dry_mesh
from shardwise.forecast.dry_optimizer import DryOptimizer
from shardwise.forecast.recording import EngineEvents, TapeRecorder, TorchCalls
from shardwise.forecast.settings import Settings
from shardwise.forecast.tape import INPUTS, Entry
from shardwise.planning.memory import SHARDS
from shardwise.policies import CPUOffloadPolicy, OffloadPolicy
from shardwise.torch_internals import map_tree

META = torch.device("meta")
# The first, one like all others, and the last.
MOST_MICRO_BATCHES = 3


@dataclass(frozen=True)
class Job:
    """What is to be trained: a model, the inputs of one rank, and how a loss comes from them."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], torch.Tensor] | None = None


@dataclass(frozen=True)
class Rehearsal:
    """The tape of some steps; ``steps`` says where each begins."""

    tape: list[Entry]
    steps: list[int]
    units: list[str]
    num_params: int
    shard_bytes: int
    trace: list[tuple[str, str, str]]


def rehearse(job: Job, settings: Settings, ranks: int, num_steps: int = 2, on_cuda: bool = True) -> Rehearsal:
    """Runs ``num_steps`` steps of the job: the first allocates what stays, such as the optimizer's state."""
    recorder = TapeRecorder()
    with ExitStack() as stack:
        stack.enter_context(rehearsing(recorder))
        stack.enter_context(choosing_as_cuda(recorder, fuses_norms=on_cuda))
        stack.enter_context(compiling_as_cuda(recorder))
        model = _built(job)
        model = model.to(META) if any(p.device != META for p in _tensors_of(model)) else model
        mesh = dry_mesh(recorder, ranks // settings.replicas, settings.replicas)
        num_params = sum(param.numel() for param in model.parameters())
        events = EngineEvents(recorder)
        stack.enter_context(TorchCalls(recorder))
        sharded = sharded_as(model, settings, mesh)
        recorder.forget()
        units = all_units(sharded)
        if not units and settings.api != "none":
            raise ConfigError(
                "the function that shards the model has made no units",
                where="shardwise.plan(shard=...)",
                fix="call fully_shard, or FullyShardedDataParallel, in it",
            )
        for unit in units:
            unit.configure(recorder=events)
            if not unit.home.is_offloaded:
                recorder.hold(unit.buffers.shards.nbytes, SHARDS)
        for buffer in sharded.buffers():
            recorder.hold(buffer.nbytes, INPUTS)
        params = list(sharded.parameters()) if settings.api == "none" else []
        for param in params:
            recorder.hold(param.nbytes, SHARDS)
        optimizer = DryOptimizer(settings.optimizer, units, params, recorder)
        starts = []
        for number in range(num_steps):
            is_last = number == num_steps - 1
            starts.append(len(recorder.tape))
            events.clear()
            # A forward gives units their names.
            events.num_params = {unit.name: len(unit.slots) for unit in units}
            # The first step only allocates what stays; more than three micro-batches only repeat the second.
            micro_batches = min(settings.micro_batches, MOST_MICRO_BATCHES if is_last else 1)
            _step(job, settings, sharded, optimizer, recorder, micro_batches)
        return Rehearsal(
            recorder.tape,
            starts,
            [unit.name for unit in units],
            num_params,
            sum(unit.buffers.shards.nbytes for unit in units) + sum(param.nbytes for param in params),
            events.of(),
        )


def _built(job: Job) -> nn.Module:
    with META:
        model: nn.Module = _run(job.build, None, "be built")
        return model


def _tensors_of(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def all_units(model: nn.Module) -> list[Unit]:
    return list(dict.fromkeys(unit for module in model.modules() for unit in units_of(module)))


def _step(
    job: Job,
    settings: Settings,
    model: Any,
    optimizer: DryOptimizer,
    recorder: TapeRecorder,
    micro_batches: int,
) -> None:
    for number in range(micro_batches):
        args, kwargs = job.inputs()
        args, kwargs = map_tree(partial(_as_meta, recorder), (args, kwargs))
        if settings.replicas > 1 and hasattr(model, "set_requires_all_reduce"):
            model.set_requires_all_reduce(number == micro_batches - 1)
        recorder.begin_phase("forward")
        output = _run(partial(model, *args, **kwargs), model, "be run")
        loss = (job.loss or loss_of)(output)
        del output
        recorder.begin_phase("backward")
        _run(partial(torch.autograd.backward, loss), model, "run backward")
        del loss, args, kwargs
    recorder.begin_phase("optimizer")
    optimizer.step()
    recorder.begin_phase("after")
    optimizer.zero_grad()


def _run(call: Callable[[], Any], model: nn.Module | None, what: str) -> Any:
    """Runs what may need data that is not there; an error says in which module."""
    try:
        return call()
    except (NotImplementedError, RuntimeError) as error:
        place = "the function that builds the model" if model is None else _place_of(error, model)
        raise ConfigError(
            f"the model cannot {what} without data: {str(error).strip().splitlines()[0]}",
            where=f"shardwise.plan, {place}",
            fix="let it depend on shapes only: without .item(), .nonzero(), .tolist() or branches on values"
            if model is not None
            else "build it without reading weights: load them after it has been sharded",
        ) from error


def _place_of(error: BaseException, model: nn.Module) -> str:
    """Names the innermost module whose code the error came through."""
    names = {module: name for name, module in model.named_modules()}
    place = type(model).__name__
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            # ``fully_shard`` has made the class a subclass of its own.
            place = f"module '{names[module]}' ({type(module).__name__.removeprefix('FSDP')})"
        frame = frame.tb_next
    return place


def _as_meta(recorder: TapeRecorder, leaf: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
    recorder.note_tensor(made, INPUTS)
    return made


def loss_of(output: Any) -> torch.Tensor:
    """Returns the loss in a model's output: the output itself, its ``loss``, or a sum of its tensors."""
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else output.float().sum()
    for name in ("loss", "logits"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return loss_of(found)
    if isinstance(output, (tuple, list)) and output:
        return loss_of(output[0])
    raise ConfigError(
        f"the model returns a {type(output).__name__}, in which there is no loss",
        where="shardwise.plan",
        fix="pass loss=, a function from the model's output to a scalar tensor",
    )


# --- sharding -------------------------------------------------------------------------------------------------------


def repeated_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Returns the classes of the model's blocks: those of which a list or sequence of modules has several."""
    found: dict[type[nn.Module], int] = {}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for kind, count in Counter(type(child) for child in module).items():
                has_params = any(
                    p.numel() for child in module if type(child) is kind for p in child.parameters()
                )
                if count > 1 and has_params:
                    found[kind] = max(found.get(kind, 0), count)
    # Not those that lie inside another one.
    return tuple(
        kind
        for kind in found
        if not any(
            isinstance(inner, kind) and outer is not inner
            for outer in model.modules()
            if type(outer) in found and type(outer) is not kind
            for inner in outer.modules()
        )
    )


def blocks_of(model: nn.Module, wrap: Any) -> list[nn.Module]:
    """Returns the modules that ``wrap`` selects, in the order in which they are registered."""
    chosen = {id(module) for module, _ in choose_modules(model, wrap, set())}
    return [module for module in model.modules() if id(module) in chosen]


def block_bytes(job: Job, settings: Settings) -> list[int]:
    """Returns the bytes of each module that is a unit under these settings, without the root."""
    model = _built(job)
    return [_bytes_of(block.parameters()) for block in _blocks_as_set(model, settings)]


def large_modules(job: Job, settings: Settings) -> tuple[str, ...]:
    """Returns the names of modules outside of the blocks with parameters of their own as large as a block.

    Of modules that share a parameter, the first is named.
    """
    model = _built(job)
    blocks = _blocks_as_set(model, settings)
    taken = {param for block in blocks for param in block.parameters()}
    least = max((_bytes_of(block.parameters()) for block in blocks), default=0)
    found = []
    for name, module in model.named_modules():
        own = {param for param in module.parameters(recurse=False) if param not in taken}
        if name and least and has_forward(module) and _bytes_of(own) >= least:
            found.append(name)
            taken |= own
    return tuple(found)


def _bytes_of(params: Iterable[torch.Tensor]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def _blocks_as_set(model: nn.Module, settings: Settings) -> list[nn.Module]:
    wrap = settings.wrap if settings.wrap is not None else repeated_classes(model) or None
    return blocks_of(model, wrap) if wrap is not None else []


def sharded_as(model: nn.Module, settings: Settings, mesh: Any) -> Any:
    if settings.shard is not None:
        return settings.shard(model, mesh) or model
    wrap = settings.wrap if settings.wrap is not None else repeated_classes(model) or None
    blocks = _blocks_as_set(model, settings)
    for index, block in enumerate(blocks):
        # Evenly spread: the block with which another whole one is due.
        if int((index + 1) * settings.recompute) > int(index * settings.recompute):
            forward = torch.compile(block.forward) if settings.compile else block.forward
            block.forward = partial(checkpoint, forward, use_reentrant=False)
        elif settings.compile:
            block.compile()
    if settings.api == "wrapper":
        return _wrapped(model, settings, mesh, blocks)
    if settings.api == "none":
        return model
    pins = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pins) if settings.offload else OffloadPolicy()
    options: Any = {
        "mesh": mesh,
        "reshard_after_forward": settings.reshard_after_forward,
        "mp_policy": settings.mp_policy,
        "offload_policy": offload,
    }
    for name in settings.alone:
        fully_shard(model.get_submodule(name), **options)
    sharded: Any = fully_shard(model, wrap=wrap, group_bytes=settings.group_bytes if blocks else 0, **options)
    if settings.forward_prefetch:
        # One module of each unit: a unit may have several.
        of_units: list[Any] = list({units_of(block): block for block in blocks}.values())
        for index, block in enumerate(of_units):
            ahead = of_units[index + 1 : index + 1 + settings.forward_prefetch]
            block.set_modules_to_forward_prefetch(ahead)
    return sharded


def _wrapped(model: nn.Module, settings: Settings, mesh: Any, blocks: list[nn.Module]) -> Any:
    from shardwise.wrapper.options import CPUOffload, MixedPrecision, ShardingStrategy
    from shardwise.wrapper.wrap_policies import lambda_auto_wrap_policy
    from shardwise.wrapper.wrapper import FullyShardedDataParallel

    policy, keeps = settings.mp_policy, settings.reshard_after_forward is False
    strategy = {
        (False, False): ShardingStrategy.FULL_SHARD,
        (False, True): ShardingStrategy.SHARD_GRAD_OP,
        (True, False): ShardingStrategy.HYBRID_SHARD,
        (True, True): ShardingStrategy._HYBRID_SHARD_ZERO2,
    }[settings.replicas > 1, keeps]
    chosen = {id(module) for module in (*blocks, *map(model.get_submodule, settings.alone))}
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=strategy,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen),
        mixed_precision=MixedPrecision(policy.param_dtype, policy.reduce_dtype),
        cpu_offload=CPUOffload(settings.offload),
        use_orig_params=True,
    )
