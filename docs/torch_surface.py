"""Writes docs/torch_surface.md: every public name of torch's FSDP and ZeRO, and what shardwise makes of it.

Run by ``make reference``. ``ROWS`` is the table; ``tests/unit/test_torch_surface.py`` compares it with the installed
torch: every public name, method and argument of torch must be in it, and every test that it names must exist.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch.distributed.fsdp
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.fsdp.wrap
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

import shardwise

PAGE = Path(__file__).resolve().parent / "torch_surface.md"
VERDICTS = ("same", "better", "differs", "refused")

_RANKS = "tests/ranks/"
_LIKE = f"{_RANKS}test_like_torch.py::test_a_program_gives_what_it_gives_with_torch"
_SHOWN = (
    "test_like_torch.py::test_modules_show_shards_and_full_parameters_when_torchs_do_with_these_exceptions"
)
_MISUSE = f"{_RANKS}test_like_torch.py::test_a_misuse_raises_an_error_of_the_kind_that_torch_raises"


@dataclass(frozen=True)
class Row:
    """One name; with ``detail``, one behaviour of it that is not torch's. ``test`` shows it."""

    name: str
    verdict: str
    test: str
    why: str = ""
    detail: str = ""


def _like(name: str, program: str) -> Row:
    return Row(name, "same", f"{_LIKE}[{program}]")


def _same(name: str, test: str) -> Row:
    return Row(name, "same", _RANKS + test)


def _better(name: str, detail: str, why: str, test: str) -> Row:
    return Row(name, "better", _RANKS + test, why, detail)


def _differs(name: str, detail: str, why: str, test: str) -> Row:
    return Row(name, "differs", _RANKS + test, why, detail)


FULLY_SHARD = (
    _like("fully_shard", "names_classes_and_state_dicts"),
    _like("fully_shard(module)", "a_list_of_modules"),
    _like("fully_shard(mesh)", "mesh_of_two_axes"),
    _like("fully_shard(reshard_after_forward)", "reshard_after_forward"),
    _like("fully_shard(shard_placement_fn)", "shard_placement_fn"),
    _like("fully_shard(mp_policy)", "torchs_mixed_precision_policy"),
    _like("fully_shard(offload_policy)", "torchs_offload_policies"),
    _like("fully_shard(ignored_params)", "ignored_params"),
    _like("fully_shard(dp_mesh_dims)", "dp_mesh_dims"),
    _differs(
        "fully_shard",
        "the default device",
        "torch takes an accelerator wherever there is one; here a group that uses gloo alone means the CPU, unless "
        "parameters are on an accelerator: `mesh` or `device_type` says otherwise",
        "test_sharding.py::test_device_type_says_where_a_model_is_sharded",
    ),
    _differs(
        "fully_shard",
        "`reshard_after_forward=True` for the outermost module",
        "it keeps its parameters all the same, because backward begins with it; "
        "`set_reshard_after_forward(True, recurse=False)` frees them",
        "test_reshard.py::test_the_root_keeps_its_parameters_whatever_is_passed",
    ),
    _better(
        "fully_shard",
        "a parameter that does not divide on the dim it is sharded along",
        "torch refuses all dims but 0",
        "test_sharding.py::test_sizes_that_do_not_divide_are_sharded_on_any_dim",
    ),
    _better(
        "fully_shard",
        "parameters of several dtypes in one call",
        "torch refuses them",
        "test_sharding.py::test_parameters_of_different_dtypes_travel_in_one_unit",
    ),
    _better(
        "fully_shard",
        "parameters tied across calls",
        "torch refuses them",
        "test_sharding.py::test_parameters_shared_across_units_stay_shared",
    ),
    _better(
        "fully_shard",
        "modules of a list that run without a model around them",
        "torch refuses a list as the outermost module",
        "test_sharding.py::test_modules_of_a_list_may_run_one_by_one_without_a_model_around_them",
    ),
    _better(
        "fully_shard",
        "a part that runs before the whole has",
        "torch refuses the first forward of the whole then",
        "test_surprises.py::test_a_unit_tied_to_another_may_be_called_alone_before_the_model_has_run",
    ),
    _better(
        "fully_shard",
        "a mesh of two axes without names",
        "torch refuses it",
        "test_two_meshes.py::test_parameters_on_two_meshes_train_as_a_plain_model",
    ),
    _better(
        "fully_shard",
        "`ShardPlacementResult` with a mesh",
        "torch needs its own `FSDPMeshInfo`, the same object for all parameters of a group; that is taken, too",
        "test_two_meshes.py::test_parameters_on_two_meshes_train_as_with_torch",
    ),
    _better(
        "fully_shard",
        "errors",
        "of the type that torch raises, before anything has changed, with a way out",
        "test_like_torch.py::test_a_misuse_raises_an_error_of_the_kind_that_torch_raises",
    ),
    _differs(
        "fully_shard",
        "what modules show after a forward without gradients",
        "shards: full parameters are kept for a backward, and there is none. torch's modules go on to show full "
        "parameters where `reshard_after_forward` is False, and in the outermost module",
        _SHOWN,
    ),
    _better(
        "fully_shard",
        "forward hooks registered after it",
        "they see the full parameters, as those registered before do; torch has freed the parameters by then",
        _SHOWN,
    ),
    _better(
        "fully_shard",
        "outputs that are views and are written to in place",
        "they get their gradients; torch warns of every view that a unit gives out, because its own backward would not "
        "be told",
        "test_autograd.py::test_outputs_may_be_written_to_in_place",
    ),
    _better(
        "fully_shard",
        "`torch.func.functional_call` with other values for sharded parameters",
        "refused; torch ignores them, and those of a model's first forward it keeps for good",
        "test_surprises.py::test_functional_call_on_a_sharded_model_is_refused_and_changes_nothing",
    ),
    _better(
        "fully_shard",
        "a forward that raised",
        "what comes after it gives what it gives without; in torch, units that were gathered go on with the weights "
        "they had",
        "test_recovery.py::test_a_step_after_a_failure_gives_the_bits_it_would_have_given_without",
    ),
    _better(
        "fully_shard",
        "`param.data = ...` on a sharded parameter",
        "it becomes the parameter's value; torch goes on with the old one",
        "test_surprises.py::test_data_assigned_to_a_sharded_parameter_is_its_value",
    ),
    _better(
        "fully_shard",
        "full tensors in `load_state_dict`",
        "each rank takes its shard; torch refuses them",
        "test_state_dicts.py::test_what_is_loaded_is_what_the_next_forward_uses",
    ),
    _better(
        "fully_shard",
        "a first forward in `torch.inference_mode`, others outside",
        "torch refuses those outside",
        "test_inference.py::test_evaluation_between_steps_sees_the_weights_of_the_last_step",
    ),
    _better(
        "fully_shard",
        "a loss that is made of gradients (`create_graph=True`)",
        "torch computes with freed memory, and raises",
        "test_autograd.py::test_a_loss_may_be_made_of_gradients",
    ),
    _better(
        "fully_shard",
        "an optimizer made before the model was sharded, or of gathered parameters",
        "torch's steps in vain; here the first step says so",
        "test_optimizers.py::test_an_optimizer_that_would_step_in_vain_says_so",
    ),
    _better(
        "fully_shard",
        "ranks that run different modules or do not arrive",
        "torch waits for its timeout; here ranks learn who diverged, and where",
        "test_trust.py::test_ranks_that_diverge_or_abort_are_told_and_train_on",
    ),
    _like("FSDPModule", "names_classes_and_state_dicts"),
    _like("FSDPModule.reshard", "unshard_and_reshard"),
    _like("FSDPModule.unshard", "unshard_and_reshard"),
    _like("FSDPModule.reset_iter_state", "reset_iter_state"),
    _better(
        "FSDPModule.reset_iter_state",
        "on a part of the model",
        "torch refuses it; here it resets the model's step",
        "test_settings.py::test_reset_frees_weights_and_drops_stashed_gradients",
    ),
    _like("FSDPModule.set_is_last_backward", "set_is_last_backward"),
    _like("FSDPModule.set_requires_gradient_sync", "set_requires_gradient_sync"),
    _like("FSDPModule.set_requires_all_reduce", "set_requires_all_reduce"),
    _like("FSDPModule.set_reshard_after_forward", "set_reshard_after_forward"),
    _like("FSDPModule.set_reshard_after_backward", "set_reshard_after_backward"),
    _better(
        "FSDPModule.set_reshard_after_backward",
        "what `parameters()` gives while parameters are kept",
        "the shards, which clipping and optimizers want; torch gives full parameters without gradients",
        "test_settings.py::test_weights_kept_after_backward_are_used_until_an_optimizer_changes_them",
    ),
    _like("FSDPModule.set_modules_to_forward_prefetch", "set_modules_to_prefetch"),
    _like("FSDPModule.set_modules_to_backward_prefetch", "set_modules_to_prefetch"),
    _like("FSDPModule.set_custom_all_gather", "custom_collectives"),
    _like("FSDPModule.set_custom_reduce_scatter", "custom_collectives"),
    _better(
        "FSDPModule.set_custom_all_gather",
        "after another method has set how a unit gathers",
        "torch drops what was set before, or refuses, by the order of the calls; here both orders are refused",
        "test_contradictions.py::test_refused_is",
    ),
    _like("FSDPModule.set_all_reduce_hook", "set_all_reduce_hook"),
    _same(
        "FSDPModule.set_post_optim_event", "test_settings.py::test_an_event_after_the_optimizer_is_used_once"
    ),
    _like("FSDPModule.set_reduce_scatter_divide_factor", "set_divide_factors"),
    _like("FSDPModule.set_gradient_divide_factor", "set_divide_factors"),
    _better(
        "FSDPModule.set_gradient_divide_factor",
        "with gloo",
        "torch needs `set_force_sum_reduction_for_comms(True)` there",
        "test_settings.py::test_a_divide_factor_takes_the_place_of_the_number_of_ranks",
    ),
    _like("FSDPModule.set_force_sum_reduction_for_comms", "set_force_sum_reduction_for_comms"),
    _like("FSDPModule.set_reduce_scatter_unused_params", "set_reduce_scatter_unused_params"),
    _like("FSDPModule.set_reduce_scatter_max_input_buffers", "settings_of_collectives"),
    _like("FSDPModule.set_separate_reduce_scatter_group", "settings_of_collectives"),
    _like("FSDPModule.set_unshard_in_backward", "set_unshard_in_backward"),
    _like("FSDPModule.set_allocate_memory_from_process_group_for_comm", "settings_of_collectives"),
    _same(
        "FSDPModule.set_symm_mem_for_comm",
        "test_settings.py::test_symmetric_memory_is_refused_on_gloo_and_changes_nothing",
    ),
    _like("UnshardHandle", "unshard_without_parameters"),
    _like("UnshardHandle.wait", "unshard_and_reshard"),
    _like("MixedPrecisionPolicy", "mixed_precision_policy"),
    _like("OffloadPolicy", "torchs_offload_policies"),
    _like("CPUOffloadPolicy", "torchs_offload_policies"),
    _like("DataParallelMeshDims", "dp_mesh_dims_that_only_replicate"),
    _same(
        "DataParallelMeshDims.shard_names",
        "test_hybrid.py::test_named_axes_of_a_larger_mesh_shard_and_replicate",
    ),
    _same(
        "DataParallelMeshDims.replicate_names",
        "test_hybrid.py::test_named_axes_of_a_larger_mesh_shard_and_replicate",
    ),
    _like("register_fsdp_forward_method", "methods_without_a_forward"),
    _like("share_comm_ctx", "share_comm_ctx"),
)

WRAPPER = (
    _same("FullyShardedDataParallel", "test_wrapper.py::test_two_ranks_match_the_oracle_bit_for_bit"),
    *(
        _same(f"FullyShardedDataParallel({argument})", test)
        for argument, test in {
            "module": "test_wrapper.py::test_two_ranks_match_the_oracle_bit_for_bit",
            "process_group": "test_wrapper.py::test_a_process_group_shards_over_its_own_ranks",
            "sharding_strategy": "test_wrapper.py::test_each_strategy_gathers_reduces_and_frees_as_it_says",
            "cpu_offload": "test_wrapper_kept.py::test_steps_on_the_host_are_seen_by_the_next_forward",
            "auto_wrap_policy": "test_wrapper.py::test_policies_choose_what_torchs_choose_and_torchs_own_work",
            "backward_prefetch": "test_wrapper.py::test_backward_and_forward_prefetch_when_told_to",
            "mixed_precision": "test_wrapper_precision.py::test_each_option_of_mixed_precision_does_what_it_says",
            "ignored_modules": "test_wrapper.py::test_ignored_modules_and_parameters_are_left_alone",
            "param_init_fn": "test_wrapper.py::"
            "test_first_values_come_from_the_first_rank_or_from_an_init_function",
            "device_id": "test_wrapper_bad_input.py::test_options_that_cannot_work_are_refused_and_change_nothing",
            "sync_module_states": "test_wrapper.py::"
            "test_first_values_come_from_the_first_rank_or_from_an_init_function",
            "forward_prefetch": "test_wrapper.py::test_backward_and_forward_prefetch_when_told_to",
            "limit_all_gathers": "test_wrapper.py::test_options_can_be_read",
            "use_orig_params": "test_wrapper.py::test_two_ranks_match_the_oracle_bit_for_bit",
            "ignored_states": "test_wrapper.py::test_ignored_modules_and_parameters_are_left_alone",
            "device_mesh": "test_wrapper.py::test_hybrid_strategies_match_the_oracle",
        }.items()
    ),
    _same(
        "FullyShardedDataParallel.module",
        "test_wrapper.py::test_names_are_clean_but_for_flat_parameters_and_attributes_fall_through",
    ),
    _same("FullyShardedDataParallel.forward", "test_wrapper.py::test_two_ranks_match_the_oracle_bit_for_bit"),
    _same("FullyShardedDataParallel.check_is_root", "test_wrapper.py::test_options_can_be_read"),
    _same("FullyShardedDataParallel.fsdp_modules", "test_wrapper.py::test_options_can_be_read"),
    _same(
        "FullyShardedDataParallel.apply",
        "test_wrapper_state.py::test_summoned_parameters_are_whole_and_changes_are_written_back",
    ),
    _same(
        "FullyShardedDataParallel.set_state_dict_type",
        "test_wrapper_state.py::test_state_dicts_of_every_kind_are_given_and_taken",
    ),
    _same(
        "FullyShardedDataParallel.get_state_dict_type",
        "test_wrapper_state.py::test_state_dicts_of_every_kind_are_given_and_taken",
    ),
    _same(
        "FullyShardedDataParallel.state_dict_type",
        "test_wrapper_state.py::test_state_dicts_of_every_kind_are_given_and_taken",
    ),
    _same(
        "FullyShardedDataParallel.summon_full_params",
        "test_wrapper_state.py::test_summoned_parameters_are_whole_and_changes_are_written_back",
    ),
    _same(
        "FullyShardedDataParallel.named_parameters",
        "test_wrapper.py::test_names_are_clean_but_for_flat_parameters_and_attributes_fall_through",
    ),
    _same(
        "FullyShardedDataParallel.named_buffers",
        "test_wrapper.py::test_names_are_clean_but_for_flat_parameters_and_attributes_fall_through",
    ),
    _same(
        "FullyShardedDataParallel.no_sync",
        "test_wrapper_accumulation.py::test_micro_batches_in_and_out_of_no_sync_equal_one_batch",
    ),
    _same(
        "FullyShardedDataParallel.clip_grad_norm_",
        "test_wrapper_state.py::test_clipping_is_that_of_the_unsharded_model",
    ),
    *(
        _same(
            f"FullyShardedDataParallel.{method}",
            "test_wrapper_state.py::test_optimizer_states_of_every_kind_are_given_and_taken",
        )
        for method in (
            "optim_state_dict",
            "optim_state_dict_to_load",
            "full_optim_state_dict",
            "sharded_optim_state_dict",
            "shard_full_optim_state_dict",
            "flatten_sharded_optim_state_dict",
            "scatter_full_optim_state_dict",
            "rekey_optim_state_dict",
        )
    ),
    _same(
        "FullyShardedDataParallel.register_comm_hook",
        "test_wrapper_precision.py::test_a_communication_hook_reduces_in_the_engines_place",
    ),
    _better(
        "FullyShardedDataParallel",
        "ranks that run modules in different orders",
        "torch warns, or hangs; here all ranks raise",
        "test_wrapper_order.py::test_ranks_that_differ_in_the_first_iteration_all_raise",
    ),
    _better(
        "FullyShardedDataParallel",
        "scalars, integers and parameters of several dtypes in one flat parameter",
        "torch refuses them",
        "test_wrapper_combined.py::test_scalars_empty_integers_and_several_dtypes_in_one_unit",
    ),
    _better(
        "FullyShardedDataParallel",
        "trainable and frozen parameters in one wrapper without `use_orig_params`",
        "torch refuses them; here they get two flat parameters. With `use_orig_params`, torch warns that gradients "
        "take the memory of all parameters; here they do not, so nothing warns",
        "test_wrapper_combined.py::test_scalars_empty_integers_and_several_dtypes_in_one_unit",
    ),
    _better(
        "FullyShardedDataParallel",
        "an inner wrapper that runs before the outermost one has",
        "torch refuses the first forward of the outermost one then",
        "test_wrapper_like_torch.py::test_what_torch_refuses_and_shardwise_does",
    ),
    _better(
        "FullyShardedDataParallel(device_id)",
        "a machine without accelerators",
        "needs nothing, and `cpu_offload` works; torch needs `device_id=torch.device('cpu')`, and refuses "
        "`cpu_offload`",
        "test_wrapper_accumulation.py::test_micro_batches_in_and_out_of_no_sync_equal_one_batch",
    ),
    _better(
        "FullyShardedDataParallel(sync_module_states)",
        "a module on the CPU, with gloo",
        "torch refuses it",
        "test_wrapper.py::test_first_values_come_from_the_first_rank_or_from_an_init_function",
    ),
    _better(
        "FullyShardedDataParallel(use_orig_params)",
        "parameters that a forward did not use",
        "they have no gradient, as without wrappers; torch gives them zeros if any of their flat parameter was used, "
        "and optimizers then decay them",
        "test_wrapper_like_torch.py::test_what_torch_refuses_and_shardwise_does",
    ),
    _better(
        "FullyShardedDataParallel.named_parameters",
        "with `use_orig_params`",
        "always the names of the unwrapped model; torch's have `_fsdp_wrapped_module.` in them outside "
        "`summon_full_params`. Flat parameters are named as in torch",
        "test_wrapper.py::test_names_are_clean_but_for_flat_parameters_and_attributes_fall_through",
    ),
    _better(
        "FullyShardedDataParallel.named_buffers",
        "with `use_orig_params`",
        "as for parameters",
        "test_wrapper_like_torch.py::test_what_torch_refuses_and_shardwise_does",
    ),
    _differs(
        "FullyShardedDataParallel",
        "the size of flat parameters",
        "shards are padded so that every parameter begins at an address that kernels are fast with, and sums are those "
        "of the unsharded model; torch does so with `use_orig_params` only",
        "test_wrapper.py::test_names_are_clean_but_for_flat_parameters_and_attributes_fall_through",
    ),
    _differs(
        "FullyShardedDataParallel",
        "`parameters()` between a forward and its backward, with SHARD_GRAD_OP and `use_orig_params`",
        "it gives shards, as always; torch's gives full parameters then",
        "test_wrapper_like_torch.py::test_what_differs_between_passes",
    ),
    _better(
        "FullyShardedDataParallel",
        "`parameters()` of a module inside, in its forward, without `use_orig_params`",
        "the full parameters under their names; torch's gives the full flat parameter",
        "test_wrapper_like_torch.py::test_what_differs_between_passes",
    ),
    _differs(
        "FullyShardedDataParallel",
        "what torch deprecates: `NO_SHARD`, `state_dict_type`, `full_optim_state_dict` and their like",
        "is not deprecated here, so nothing warns of it",
        "test_wrapper_like_torch.py::test_what_torch_refuses_and_shardwise_does",
    ),
    _better(
        "MixedPrecision(keep_low_precision_grads)",
        "a `reduce_dtype` that is not the `param_dtype`",
        "gradients stay in the dtype they were reduced in, as torch's documentation says; torch casts them once more",
        "test_wrapper_like_torch.py::test_what_torch_refuses_and_shardwise_does",
    ),
    _better(
        "FullyShardedDataParallel.clip_grad_norm_",
        "when all gradients are of backwards under `no_sync`",
        "it says so; torch clips each rank's own sums, which are not the gradients yet",
        "test_wrapper_gradients.py::"
        "test_gradients_held_without_sync_are_neither_clipped_nor_shown_as_if_there_were_none",
    ),
    _better(
        "FullyShardedDataParallel.state_dict_type",
        "FULL state dicts with tensor parallelism",
        "full tensors; torch's are this rank's parts, as DTensors, so that the first rank's file lacks the others",
        "test_wrapper_tensor_parallel.py::test_a_tensor_parallel_model_trains_clips_and_saves_as_a_plain_one",
    ),
    _better(
        "enable_wrap",
        "one inside another",
        "the inner one counts; torch refuses it",
        "test_wrapper_like_torch.py::test_what_torch_refuses_and_shardwise_does",
    ),
    _better(
        "FullyShardedDataParallel.summon_full_params",
        "a forward inside; `with_grads` with `offload_to_cpu`, with `rank0_only`, or without `use_orig_params`; "
        "`offload_to_cpu` with NO_SHARD",
        "torch refuses them, or breaks",
        "test_wrapper_like_torch.py::test_what_torch_refuses_and_shardwise_does",
    ),
    _better(
        "FullyShardedDataParallel",
        "a state dict that does not fit",
        "nothing of it is loaded",
        "test_wrapper_state.py::test_a_state_dict_that_does_not_fit_loads_nothing",
    ),
    _better(
        "FullyShardedDataParallel.state_dict_type",
        "SHARDED state dicts without a device mesh",
        "DTensors, as with one, which `torch.distributed.checkpoint` saves and loads on any number of ranks",
        "test_wrapper_combined.py::test_torchs_checkpoints_move_between_worlds",
    ),
    _better(
        "FullyShardedDataParallel",
        "`use_orig_params` or `limit_all_gathers` other in an inner wrapper",
        "torch refuses the first forward",
        "test_wrapper_like_torch.py::test_programs_that_torch_refuses_run",
    ),
    _better(
        "FullyShardedDataParallel",
        "parameters tied across wrappers",
        "torch sees them as different parameters, and breaks",
        "test_wrapper_like_torch.py::test_programs_that_torch_refuses_run",
    ),
    _better(
        "FullyShardedDataParallel(sharding_strategy)",
        "the hybrid strategies without `process_group`, `device_mesh` or `auto_wrap_policy`",
        "shards within a host, replicates between hosts, as with a policy; torch refuses it, since each of its "
        "wrappers would make groups of its own",
        "test_wrapper_like_torch.py::test_programs_that_torch_refuses_run",
    ),
    _better(
        "FullyShardedDataParallel(sharding_strategy)",
        "the hybrid strategies with one rank in each shard group",
        "gradients are summed over replicas; torch switches to NO_SHARD within the shard group, and replicas "
        "drift apart",
        "test_wrapper_like_torch.py::test_what_differs_from_torch_on_purpose",
    ),
    _differs(
        "FullyShardedDataParallel.summon_full_params",
        "which objects parameters are, with `use_orig_params`",
        "shards and full parameters are different tensors, so a list of parameters that was made outside has shards; "
        "torch's parameters become full ones in place. Ask for `parameters()` inside",
        "test_wrapper_like_torch.py::test_what_differs_from_torch_on_purpose",
    ),
    _better(
        "FullyShardedDataParallel.summon_full_params",
        "`writeback=False` with NO_SHARD",
        "changes are dropped, as torch's documentation says; torch keeps them",
        "test_wrapper_like_torch.py::test_what_differs_from_torch_on_purpose",
    ),
    _better(
        "FullyShardedDataParallel.state_dict_type",
        "LOCAL state dicts with a device mesh",
        "torch refuses them",
        "test_wrapper_like_torch.py::test_programs_that_torch_refuses_run",
    ),
    _better(
        "FullyShardedDataParallel.no_sync",
        "a `reduce_dtype` wider than the `param_dtype`",
        "micro-batches are added up in it; torch adds them up in the `param_dtype`",
        "test_wrapper_like_torch.py::test_what_differs_from_torch_on_purpose",
    ),
    _better(
        "FullyShardedDataParallel.optim_state_dict",
        "FULL states with `use_orig_params`, on a CPU",
        "each state under its own name; torch 2.13 gives Adam's `exp_avg_sq` as its `exp_avg`, too",
        "test_wrapper_optim_state.py::test_states_go_under_their_own_names_whatever_order_optimizers_have",
    ),
    _better(
        "FullyShardedDataParallel.optim_state_dict_to_load",
        "a state that does not fit",
        "refused; torch drops the states of parameters that are in no group, and fills up flat parameters with zeros",
        "test_wrapper_optim_state.py::test_states_that_one_flat_parameter_cannot_hold_are_refused",
    ),
    _same("ShardingStrategy", "test_wrapper.py::test_each_strategy_gathers_reduces_and_frees_as_it_says"),
    _same("BackwardPrefetch", "test_wrapper.py::test_backward_and_forward_prefetch_when_told_to"),
    _same("CPUOffload", "test_wrapper.py::test_torchs_enums_and_records_are_understood"),
    _same(
        "MixedPrecision", "test_wrapper_precision.py::test_each_option_of_mixed_precision_does_what_it_says"
    ),
    *(
        _same(name, "test_wrapper_state.py::test_state_dicts_of_every_kind_are_given_and_taken")
        for name in (
            "StateDictType",
            "StateDictConfig",
            "FullStateDictConfig",
            "LocalStateDictConfig",
            "ShardedStateDictConfig",
            "StateDictSettings",
        )
    ),
    *(
        _same(name, "test_wrapper_state.py::test_optimizer_states_of_every_kind_are_given_and_taken")
        for name in (
            "OptimStateDictConfig",
            "FullOptimStateDictConfig",
            "LocalOptimStateDictConfig",
            "ShardedOptimStateDictConfig",
            "OptimStateKeyType",
        )
    ),
    *(
        _same(name, "test_wrapper.py::test_policies_choose_what_torchs_choose_and_torchs_own_work")
        for name in (
            "always_wrap_policy",
            "lambda_auto_wrap_policy",
            "transformer_auto_wrap_policy",
            "size_based_auto_wrap_policy",
            "ModuleWrapPolicy",
            "CustomPolicy",
            "wrap",
            "enable_wrap",
        )
    ),
    _same("ShardedGradScaler", "test_wrapper_precision.py::test_an_infinity_on_one_rank_is_one_for_all"),
    _same(
        "ShardedGradScaler.scale", "test_wrapper_precision.py::test_an_infinity_on_one_rank_is_one_for_all"
    ),
    _same(
        "ShardedGradScaler.unscale_", "test_wrapper_precision.py::test_an_infinity_on_one_rank_is_one_for_all"
    ),
    _same(
        "ShardedGradScaler.update", "test_wrapper_precision.py::test_an_infinity_on_one_rank_is_one_for_all"
    ),
)

ZERO = (
    _same("ZeroRedundancyOptimizer", "test_zero_optimizer.py::test_it[matches_the_unsharded_optimizer]"),
    *(
        _same(f"ZeroRedundancyOptimizer({argument})", test)
        for argument, test in {
            "params": "test_zero_optimizer.py::test_it[takes_parameters_in_any_form]",
            "optimizer_class": "test_zero_optimizer.py::test_it[steps_optimizers_with_steps_of_their_own]",
            "process_group": "test_zero_optimizer.py::test_it[shares_out_over_some_of_the_ranks]",
            "parameters_as_bucket_view": "test_zero_optimizer.py::"
            "test_it[steps_small_neighbours_in_a_buffer_as_one_tensor]",
            "overlap_with_ddp": "test_zero_overlap.py::test_it[overlap_equals_ddp_with_a_local_optimizer]",
        }.items()
    ),
    _same(
        "ZeroRedundancyOptimizer.add_param_group",
        "test_zero_optimizer.py::test_it[groups_up_front_and_added_later_agree_with_the_unsharded_optimizer]",
    ),
    _same("ZeroRedundancyOptimizer.step", "test_zero_optimizer.py::test_it[steps_with_a_closure]"),
    _same(
        "ZeroRedundancyOptimizer.consolidate_state_dict",
        "test_zero_state.py::test_it[consolidated_state_is_an_unsharded_optimizers]",
    ),
    _same(
        "ZeroRedundancyOptimizer.state_dict",
        "test_zero_state.py::test_it[state_dict_shows_what_was_consolidated_last]",
    ),
    _same(
        "ZeroRedundancyOptimizer.load_state_dict",
        "test_zero_state.py::test_it[every_rank_loads_what_one_rank_consolidated]",
    ),
    _same("ZeroRedundancyOptimizer.join_hook", "test_zero_join.py::test_it[joins_with_ddp]"),
    _same("ZeroRedundancyOptimizer.join_device", "test_zero_join.py::test_it[joins_with_ddp]"),
    _same("ZeroRedundancyOptimizer.join_process_group", "test_zero_join.py::test_it[joins_with_ddp]"),
    _better(
        "ZeroRedundancyOptimizer",
        "`overlap_with_ddp` in the first steps",
        "torch skips two or three steps until DDP has rebuilt its buckets; here the first backward steps",
        "test_zero_overlap.py::test_it[overlap_equals_ddp_with_a_local_optimizer]",
    ),
    _better(
        "ZeroRedundancyOptimizer",
        "`overlap_with_ddp` before the first backward",
        "parameter groups can be added and states consolidated; torch refuses both until it has stepped",
        "test_zero_overlap.py::test_it[overlap_steps_a_group_that_was_added_later]",
    ),
    _better(
        "ZeroRedundancyOptimizer.step",
        "`overlap_with_ddp` without a hook that steps",
        "raises, because no parameter would ever be updated; torch's does nothing, and says so in its log alone",
        "test_zero_errors.py::test_it[refuses_overlap_that_would_never_step]",
    ),
    _better(
        "ZeroRedundancyOptimizer",
        "parameters of several dtypes; `defaults` of the class, which schedulers ask for",
        "torch refuses several dtypes, and has no defaults",
        "test_zero_optimizer.py::test_it[shows_the_defaults_of_its_class]",
    ),
    _better(
        "ZeroRedundancyOptimizer.join_hook",
        "the gradients of a rank that has no more inputs",
        "those of the ranks that have; torch steps with the last ones that it had",
        "test_zero_join.py::test_it[joins_with_ddp]",
    ),
    _better(
        "ZeroRedundancyOptimizer",
        "a parameter that comes twice",
        "refused; torch warns that it will be, and steps it twice",
        "test_zero_errors.py::test_it[refuses_options_that_cannot_work]",
    ),
    _same("hook_with_zero_step", "test_zero_overlap.py::test_it[overlap_equals_ddp_with_a_local_optimizer]"),
    _same(
        "hook_with_zero_step_interleaved",
        "test_zero_overlap.py::test_only_the_interleaved_hook_steps_while_backward_still_runs",
    ),
)

SECTIONS = {
    "`fully_shard` (torch.distributed.fsdp, FSDP2)": FULLY_SHARD,
    "`FullyShardedDataParallel` (torch.distributed.fsdp, FSDP1)": WRAPPER,
    "`ZeroRedundancyOptimizer` and `ddp_zero_hook`": ZERO,
}
# Arguments that torch does not have.
OWN_ARGUMENTS = {
    "fully_shard": ("device_type", "wrap", "group_bytes", "exact", "plan", "inputs", "loss", "budget_gb"),
    "CPUOffloadPolicy": ("device_budget_gb",),
    "FullyShardedDataParallel": ("exact",),
    "UnshardHandle": ("units",),
    "ZeroRedundancyOptimizer": ("balanced",),
}
ROWS = tuple(row for rows in SECTIONS.values() for row in rows)
# Environment variables that torch's three APIs read; ``detail`` says what each does.
ENVIRONMENT = (
    Row(
        "FSDP_USE_FULL_PREC_IN_EVAL",
        "same",
        f"{_RANKS}test_wrapper_like_torch.py::test_the_wrapper_does_what_torchs_does[dtypes_in_eval]",
        detail="`1`: wrapped modules in eval mode compute in full precision",
    ),
    Row(
        "TORCH_DISTRIBUTED_DEBUG",
        "better",
        f"{_RANKS}test_wrapper_order.py::test_ranks_that_differ_in_the_first_iteration_all_raise",
        detail="`DETAIL`: ranks compare the order in which they run wrapped modules",
    ),
)


def torch_names() -> Iterator[tuple[str, Any]]:
    """Every public name of torch that the page is about, with what it stands for, and the methods of classes."""
    modules = (torch.distributed.fsdp.wrap, torch.distributed.fsdp.sharded_grad_scaler, ddp_zero_hook)
    names = {name: getattr(torch.distributed.fsdp, name) for name in torch.distributed.fsdp.__all__}
    names["ZeroRedundancyOptimizer"] = ZeroRedundancyOptimizer
    for module in modules:
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__:
                names[name] = value
    for name, value in names.items():
        yield name, value
        for method, member in vars(value).items() if inspect.isclass(value) else ():
            is_method = inspect.isfunction(member) or isinstance(
                member, (staticmethod, classmethod, property)
            )
            if is_method and not method.startswith("_"):
                yield f"{name}.{method}", getattr(value, method)


def own(name: str) -> Any:
    """What shardwise has under one of torch's names; None if nothing."""
    value: Any = shardwise
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def arguments(value: Any) -> dict[str, Any]:
    """The arguments of a callable with their defaults, without those of its own kind: self, and private ones."""
    if isinstance(value, EnumMeta):
        # Choices: nobody calls the class.
        return {}
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return {}
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if name != "self"
        and not name.startswith("_")
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def page() -> str:
    counts = {verdict: sum(row.verdict == verdict for row in ROWS) for verdict in VERDICTS}
    intro = (
        (
            "Written by `make reference`; do not edit. Every public name, method and argument of torch's FSDP2, FSDP1 "
            "and ZeRO: what a program may expect of shardwise after its imports have changed, and the test that shows "
            "it."
        ),
        (
            f"*same*: as in torch ({counts['same']} rows). *better*: shardwise does more, or says what torch keeps to "
            f"itself ({counts['better']}). *differs*: on purpose ({counts['differs']}). *refused*: torch does it "
            f"({counts['refused']})."
        ),
    )
    parts = ["# torch's API, name by name\n", *(f"\n{textwrap.fill(text, 118)}\n" for text in intro)]
    for title, rows in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| name | arguments | | test |\n|---|---|---|---|\n")
        parts.extend(_line(row) for row in rows if not row.detail)
        parts.append("\nWhere it is not the same:\n\n| name | | | because | test |\n|---|---|---|---|---|\n")
        parts.extend(
            f"| `{row.name}` | {row.detail} | {row.verdict} | {row.why} | {_described(row.test)} |\n"
            for row in rows
            if row.detail
        )
    parts.append("\n## Environment variables\n\n| name | what it does | | test |\n|---|---|---|---|\n")
    parts.extend(
        f"| `{row.name}` | {row.detail} | {row.verdict} | {_described(row.test)} |\n" for row in ENVIRONMENT
    )
    return "".join(parts)


def _line(row: Row) -> str:
    added = OWN_ARGUMENTS.get(row.name, ())
    listed = ", ".join(f"`{name}`" for name in arguments(own(row.name)) if name not in added)
    return f"| `{row.name}` | {listed} | {row.verdict} | {_described(row.test)} |\n"


def _described(test: str) -> str:
    path, _, name = test.partition("::")
    _, bracket, case = name.partition("[")
    words = case.removesuffix("]") if bracket else name.removeprefix("test_")
    return f"`{path.removeprefix('tests/')}`: {words.replace('_', ' ')}"


if __name__ == "__main__":
    PAGE.write_text(page())
