"""Every claim about the optimizer, once: what it is to hold for, and on how many ranks of which kind.

`tests/ranks` runs the claims on threads and gloo processes, `tests/gpu` on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.ranks.tables import Case, cases_of, run_cases, slow
from tests.ranks.zero_cases import errors, exchange, interface, join, overlap, parity, state
from tests.ranks.zero_cases.models import OPTIMIZERS

NO_ARGUMENTS: list[Case] = [{}]
LAYOUTS = cases_of(as_views=[False, True], balanced=[False, True])
BOTH_HOOKS = cases_of(interleaved=[False, True])
HOOKS_AND_SHARINGS = cases_of(interleaved=[False, True], shard_buckets=[False, True])


@dataclass(frozen=True)
class Claim:
    """A function that each rank runs and that raises where the claim does not hold; and the worlds to run it in."""

    holds: Callable[..., Any]
    cases: Sequence[Case] = tuple(NO_ARGUMENTS)
    gloo: tuple[int, ...] = (2,)
    # As gloo, but left to `make test-slow`.
    slow_gloo: tuple[int, ...] = ()
    nccl: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    about: str = ""


@dataclass(frozen=True)
class Run:
    """One claim in one world: one call of ranks for all its cases."""

    claim: Claim
    kind: str
    world: int

    @property
    def name(self) -> str:
        about = f"-{self.claim.about}" if self.claim.about else ""
        return f"{self.claim.holds.__name__}{about}-{self.world}-{self.kind}"

    def check(self) -> None:
        run_cases(self.claim.holds, self.world, self.claim.cases, kind=self.kind)


def each_run(claims: Iterable[Claim], *kinds: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the runs of these claims, named after the claim."""
    runs = [Run(claim, kind, world) for claim in claims for kind in kinds for world in getattr(claim, kind)]
    rest = [Run(claim, "gloo", world) for claim in claims if "gloo" in kinds for world in claim.slow_gloo]
    ids = [run.name for run in (*runs, *rest)]
    return pytest.mark.parametrize("run", [*runs, *map(slow, rest)], ids=ids)


OPTIMIZER = (
    # Bits where parameters are whole and where cuts are aligned; an ulp a step where a small one is cut.
    # In two runs each: all of it in one takes minutes on ranks that share a GPU.
    *(
        Claim(
            parity.matches_the_unsharded_optimizer,
            cases_of(name=list(OPTIMIZERS), balanced=[balanced]),
            gloo=(world,),
            slow_gloo=tuple({2, 3, 4} - {world}),
            nccl=(2, 4),
            about=about,
        )
        for about, balanced, world in (("whole", False, 3), ("balanced", True, 2))
    ),
    Claim(
        parity.stays_within_an_ulp_a_step_where_a_small_parameter_is_cut,
        cases_of(name=list(OPTIMIZERS)),
        gloo=(3,),
    ),
    Claim(
        parity.steps_large_parameters_block_by_block,
        [*cases_of(name=list(OPTIMIZERS), balanced=[False]), *cases_of(name=["adam"], balanced=[True])],
        nccl=(2,),
    ),
    Claim(
        parity.steps_small_neighbours_in_a_buffer_as_one_tensor,
        cases_of(name=list(OPTIMIZERS), balanced=[False, True]),
        gloo=(2,),
    ),
    Claim(parity.steps_parameters_of_several_dtypes, LAYOUTS, gloo=(3,), nccl=(2, 4), threads=(3,)),
    Claim(parity.reduced_gradients_give_the_local_optimizers_step, nccl=(2, 4), threads=(2,)),
    Claim(
        parity.groups_up_front_and_added_later_agree_with_the_unsharded_optimizer,
        LAYOUTS,
        gloo=(3,),
        nccl=(2,),
    ),
    Claim(parity.shares_out_over_some_of_the_ranks, LAYOUTS, gloo=(3,), nccl=(3,)),
    Claim(interface.exposes_state_and_groups_as_any_optimizer_does, gloo=(1, 2), nccl=(2,)),
    Claim(interface.follows_a_learning_rate_scheduler, gloo=(1, 2), nccl=(2,)),
    Claim(interface.lets_a_scheduler_cycle_momentum, gloo=(), nccl=(2,), threads=(2,)),
    # One parameter is owned by one rank, and only that rank's local optimizer has something to add a key to.
    Claim(interface.steps_optimizers_with_steps_of_their_own, gloo=(1,), nccl=(1,)),
    Claim(interface.steps_with_a_closure, LAYOUTS, nccl=(2,)),
    Claim(interface.steps_each_parameter_by_its_owners_gradient, cases_of(as_views=[False, True]), nccl=(2,)),
    Claim(interface.steps_by_gradients_a_closure_makes, LAYOUTS, nccl=(2,)),
    Claim(interface.clears_gradients_of_parameters_it_does_not_own, gloo=(), nccl=(2,), threads=(2,)),
    Claim(interface.takes_parameters_in_any_form, gloo=(), nccl=(2,), threads=(2,)),
    Claim(interface.takes_named_parameters, cases_of(balanced=[False, True])),
    Claim(interface.tells_the_local_optimizer_the_names_of_what_it_steps, gloo=(), nccl=(2,), threads=(2,)),
    Claim(interface.shows_hooks_of_the_local_optimizer_the_tensors_it_holds),
    Claim(interface.takes_gradients_of_another_dtype, LAYOUTS, gloo=(), nccl=(2,), threads=(3,)),
    Claim(interface.shows_the_defaults_of_its_class, gloo=(), nccl=(2,), threads=(2,)),
    Claim(interface.shares_out_equal_element_counts, gloo=(), nccl=(2,), threads=(1, 2, 4)),
    Claim(interface.steps_beside_a_large_frozen_parameter, LAYOUTS, nccl=(2,)),
    Claim(interface.steps_a_parameter_that_was_frozen_at_first, LAYOUTS, nccl=(2,)),
    Claim(interface.follows_parameters_whose_memory_was_replaced, LAYOUTS, gloo=(3,), nccl=(2,)),
    Claim(interface.follows_parameters_to_another_dtype, LAYOUTS, gloo=(3,), nccl=(2,)),
    Claim(interface.keeps_the_memory_format_of_parameters, LAYOUTS, gloo=(3,), nccl=(2,)),
    Claim(
        interface.shares_out_state_evenly,
        cases_of(dominating=[300_000]),
        gloo=(),
        nccl=(2, 4),
        threads=(2, 3, 4),
    ),
)

STATE = (
    Claim(
        state.consolidated_state_is_an_unsharded_optimizers,
        cases_of(name=["momentum", "adam", "adagrad", "rmsprop"], balanced=[False, True]),
        gloo=(3,),
        nccl=(2,),
        threads=(3,),
    ),
    Claim(
        state.every_rank_loads_what_one_rank_consolidated,
        cases_of(balanced=[False, True], loads_balanced=[False, True]),
        gloo=(3,),
        nccl=(2,),
    ),
    Claim(state.loads_an_unsharded_optimizers_state, cases_of(balanced=[False, True]), nccl=(2,)),
    Claim(state.state_dict_shows_what_was_consolidated_last, nccl=(2,)),
    Claim(
        state.consolidates_state_of_any_form,
        cases_of(form=list(state.ANY_FORM)),
        gloo=(),
        nccl=(2,),
        threads=(3,),
    ),
    Claim(state.runs_the_hooks_around_saving_and_loading),
    Claim(state.a_sharded_state_dict_needs_no_communication),
    Claim(state.overlap_keeps_state_that_was_loaded, cases_of(shard_buckets=[False, True]), nccl=(2,)),
)

ERRORS = (
    Claim(errors.refuses_bad_parameters, nccl=(2,), threads=(2,)),
    Claim(errors.finds_ranks_with_other_parameters, gloo=(3,), nccl=(2,), threads=(2, 3)),
    Claim(
        errors.finds_ranks_that_list_the_same_parameters_in_other_orders, gloo=(3,), nccl=(2,), threads=(2,)
    ),
    Claim(errors.what_one_rank_refuses_keeps_no_other_waiting, gloo=(3,), nccl=(2,)),
    Claim(errors.keeps_its_groups_when_an_added_one_is_refused),
    Claim(errors.refuses_the_state_of_another_model, nccl=(2,)),
    Claim(errors.refuses_options_that_cannot_work),
    Claim(errors.refuses_overlap_that_would_never_step),
    Claim(errors.refuses_memory_with_gaps_that_a_parameter_was_given),
    Claim(errors.refuses_a_sparse_gradient_only_where_it_would_be_split, gloo=(3,), nccl=(2,)),
)

JOIN = (
    Claim(join.joins_with_gradients_set_by_another_hook, gloo=(2, 4), nccl=(2, 4)),
    Claim(join.joins_without_gradients_of_its_own, gloo=(3,), nccl=(2,)),
    Claim(
        join.joins_with_ddp,
        [
            {"as_views": views_and_balanced, "balanced": views_and_balanced, "unused": unused}
            for views_and_balanced in (False, True)
            for unused in (False, True)
        ],
        gloo=(3,),
        nccl=(2,),
    ),
    Claim(join.steps_normally_after_a_join, nccl=(2,)),
)

OVERLAP = (
    Claim(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        cases_of(name=["adam"], interleaved=[False, True], shard_buckets=[False, True]),
        nccl=(2,),
        about="adam",
    ),
    Claim(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        cases_of(
            name=["momentum", "rmsprop", "adagrad"], interleaved=[False, True], shard_buckets=[False, True]
        ),
        gloo=(),
        slow_gloo=(2,),
        nccl=(2,),
        about="others",
    ),
    Claim(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        cases_of(name=["adamw"], interleaved=[False, True], shard_buckets=[False, True]),
        gloo=(),
        slow_gloo=(3,),
        nccl=(4,),
    ),
    Claim(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        cases_of(name=["nesterov"], interleaved=[False, True], shard_buckets=[False, True]),
        gloo=(),
        slow_gloo=(4,),
    ),
    Claim(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        cases_of(name=["sgd"], interleaved=[False, True], shard_buckets=[True], balanced=[True]),
        gloo=(2,),
        slow_gloo=(4,),
        nccl=(2,),
        about="balanced",
    ),
    Claim(overlap.a_bucket_belongs_to_one_rank_also_after_ddp_rearranged_its_buckets, BOTH_HOOKS, nccl=(2,)),
    Claim(
        overlap.overlap_leaves_unused_parameters_alone,
        cases_of(interleaved=[False, True], static_graph=[False, True]),
        nccl=(2,),
    ),
    Claim(overlap.overlap_steps_only_where_gradients_are_synchronised, BOTH_HOOKS, nccl=(2,)),
    Claim(overlap.overlap_takes_a_hook_that_gives_its_result_elsewhere, BOTH_HOOKS, nccl=(2,)),
    Claim(overlap.overlap_steps_a_group_that_was_added_later, BOTH_HOOKS, nccl=(2,)),
    Claim(overlap.two_optimizers_step_one_model_in_one_backward, gloo=(3,), nccl=(2,)),
    Claim(overlap.overlap_follows_a_scheduler_without_a_call_of_step, nccl=(2,)),
    Claim(overlap.the_watch_sees_overlapped_steps_get_on),
    Claim(overlap.overlap_joins_uneven_inputs, HOOKS_AND_SHARINGS, gloo=(3,), nccl=(2,)),
    # The long version, 20 seeds of 50 steps, is benchmarks/zero_soak.py.
    Claim(
        overlap.soaks,
        cases_of(seed=[1], steps=[8], interleaved=[False, True], shard_buckets=[False, True]),
        gloo=(),
        slow_gloo=(3,),
        nccl=(2,),
    ),
)

UNEVEN = [[3, 0, 70_000, 5], [], [1, 200_000, 2]]
MANY = [[4096] * 1500, [4096] * 1700]
LARGE = [[1_200_000], [7, 1_200_001, 0, 300], []]

EXCHANGE = (
    Claim(
        exchange.moves_everyones_tensors,
        cases_of(numels=[UNEVEN], reads=[False]),
        gloo=(),
        nccl=(3,),
        threads=(3,),
    ),
    Claim(
        exchange.moves_everyones_tensors,
        [*cases_of(numels=[UNEVEN], reads=[False]), *cases_of(numels=[LARGE], reads=[False, True])],
        gloo=(3,),
    ),
    Claim(exchange.moves_everyones_tensors, cases_of(numels=[MANY], reads=[False, True]), about="very many"),
    Claim(exchange.packs_small_tensors_into_one_broadcast_a_rank, gloo=(3,)),
    Claim(
        exchange.keeps_exchanges_apart_that_are_under_way_together, cases_of(reads=[False, True]), gloo=(3,)
    ),
    Claim(exchange.reads_where_a_peers_tensors_have_moved_to),
    Claim(exchange.may_write_as_soon_as_the_exchange_is_over, gloo=(3,)),
    Claim(exchange.ends_waits_for_ranks_that_stall_or_raise_and_goes_on_with_them, gloo=(3,)),
)
