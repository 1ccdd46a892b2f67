"""Profiles say where time goes: how they count calls on the host, and what they make of a GPU's kernels."""

import importlib
import json
import sys
import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load():
    """Imports a benchmark as it imports its neighbours."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


# --- counted calls ----------------------------------------------------------------------------------------------------


class Clock:
    """Time passes when it is told to."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(load, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(load("counting"), "perf_counter_ns", clock)
    return clock


def family(clock):
    class Parent:
        def inner(self):
            clock.now += 3

        def outer(self):
            clock.now += 10
            self.inner()
            self.inner()
            clock.now += 10

    class Child(Parent):
        pass

    return Parent, Child


def test_a_methods_own_time_is_without_that_of_counted_ones_it_calls(load, clock):
    parent, _ = family(clock)
    inner, outer = (load("counting").Counted("a kind", parent, name) for name in ("inner", "outer"))
    for method in (inner, outer):
        method.open()
    one = parent()
    one.outer()
    one.outer()
    assert (outer.calls, outer.inner_calls, outer.own_ns) == (2, 4, 40)
    assert (inner.calls, inner.inner_calls, inner.own_ns) == (4, 0, 12)
    outer.open()
    assert (outer.calls, outer.inner_calls, outer.own_ns) == (0, 0, 0)


def test_what_another_thread_does_meanwhile_is_its_own(load, clock):
    parent, _ = family(clock)

    class Waiting:
        def wait(self):
            clock.now += 1
            thread = threading.Thread(target=parent().outer)
            thread.start()
            thread.join()

    wait = load("counting").Counted("a kind", Waiting, "wait")
    outer = load("counting").Counted("a kind", parent, "outer")
    wait.open()
    outer.open()
    Waiting().wait()
    assert (wait.inner_calls, wait.own_ns, outer.own_ns) == (0, 27, 26)


def test_a_call_that_raises_is_counted_and_leaves_nothing_open(load, clock):
    class Failing:
        def fail(self):
            clock.now += 5
            raise ValueError("as it should")

    fail = load("counting").Counted("a kind", Failing, "fail")
    fail.open()
    for _ in range(2):
        with pytest.raises(ValueError, match="as it should"):
            Failing().fail()
    assert (fail.calls, fail.own_ns) == (2, 10)
    assert load("counting")._stack.open == []


def test_closed_methods_are_what_they_were_and_bound_ones_stay_counted(load, clock):
    parent, child = family(clock)
    own, inherited = vars(parent)["inner"], load("counting").Counted("a kind", child, "inner")
    method = load("counting").Counted("a kind", parent, "inner")
    method.open()
    inherited.open()
    bound = parent().inner
    inherited.close()
    method.close()
    assert vars(parent)["inner"] is own
    assert "inner" not in vars(child)
    parent().inner()
    assert method.calls == 0
    bound()
    assert method.calls == 1


def test_the_cost_of_counting_is_taken_off(load):
    counting = load("counting")
    cost = counting.counting_cost(batches=5, calls=20)
    assert cost.inside + cost.outside > 0
    counts = counting.Counts(calls=3, inner_calls=7, own_ns=1000)
    assert counting.Cost(inside=20, outside=30).own_ns(counts) == 1000 - 3 * 20 - 7 * 30


# --- the host ---------------------------------------------------------------------------------------------------------


def test_all_that_the_host_profile_counts_is_where_it_says(load):
    host_profile = load("host_profile")
    kinds = [method.kind for method in host_profile.counted_methods("cuda")]
    assert set(kinds) == set(host_profile.METHODS)
    names = {f"{method.owner.__name__}.{method.name}" for method in host_profile.counted_methods("cuda")}
    assert {
        "Tensor.copy_",
        "CopyBlocks.run",
        "SplitRows.run",
        "FusedPack.fill",
        "ContiguousPack.fill",
    } <= names
    assert host_profile.LANES not in {method.kind for method in host_profile.counted_methods("cpu")}


def test_a_method_that_has_gone_is_named_and_not_left_out(load, monkeypatch):
    host_profile = load("host_profile")
    monkeypatch.setitem(
        host_profile.METHODS,
        host_profile.GROUP,
        {
            "shardwise.engine.unit.unit.Unit": "reshard gone",
            "torch.Gone": "x",
            "shardwise.engine.*": "run nowhere",
        },
    )
    with pytest.raises(
        LookupError,
        match=r"unit\.Unit\.gone, torch\.Gone\.x, shardwise\.engine\.\*\.nowhere; METHODS must say",
    ):
        host_profile.counted_methods("cpu")


def test_rows_are_medians_for_each_unit_and_every_kind_must_have_been_called(load):
    host_profile, counting = load("host_profile"), load("counting")
    profile = host_profile.Profile("cpu")
    kinds = [method.kind for method in profile._methods]
    for own_ns in (9000, 5000, 7000):
        profile.steps.append([counting.Counts(calls=4, inner_calls=1, own_ns=own_ns) for _ in kinds])
    rows = profile.rows(counting.Cost(inside=100, outside=200), num_units=2)
    assert {row.kind for row in rows} == set(kinds)
    assert {(row.us, row.calls) for row in rows} == {((7000 - 4 * 100 - 200) / 2000, 2.0)}
    nobody = counting.Counts(0, 0, 0)
    profile.steps = [
        [nobody if kind == host_profile.MEMORY else counts for kind, counts in zip(kinds, step, strict=True)]
        for step in profile.steps
    ]
    with pytest.raises(AssertionError, match=r"was called: \{'memory that comes and goes'\}"):
        profile.rows(counting.Cost(inside=100, outside=200), num_units=2)


class Bell:
    def ring(self) -> str:
        return "ding"


def test_a_stilled_method_works_until_it_is_still_and_after_it_was_closed(load):
    stilled = load("counting").Stilled(Bell, "ring", "hush")
    stilled.open()
    bound = Bell().ring
    assert bound() == "ding"
    stilled.is_still = True
    assert (bound(), Bell().ring()) == ("hush", "hush")
    stilled.close()
    assert Bell().ring() == "ding"


def test_a_still_model_sends_and_copies_nothing_and_keeps_its_memory(load):
    host_profile = load("host_profile")
    names = {f"{method.owner.__name__}.{method.name}" for method in host_profile.stilled_methods("cpu")}
    assert {
        "GroupChannel.issue_all_gather",
        "GroupChannel.issue_reduce_scatter",
        "ElasticBuffer.shrink",
    } <= names
    assert {"ContiguousPack.fill", "FusedPack.fill", "CopyBlocks.run"} <= names
    assert "ElasticBuffer.grow" not in names


def test_all_parts_add_up_to_the_overhead_ratio(load):
    host_profile = load("host_profile")
    rows = [
        host_profile.Row("a", host_profile.GROUP, 30.0, 3.0),
        host_profile.Row("b", host_profile.PYTHON, 20.0, 1.0),
        host_profile.Row("c", host_profile.PYTHON, 10.0, 1.0),
    ]
    parts = host_profile.shares(rows, ours_us=100.0, peer_us=400.0)
    assert parts[host_profile.PYTHON] == {"us": 30.0, "of_ours": 0.3, "of_peer": 0.075}
    assert parts[host_profile.BESIDE]["us"] == 40.0
    assert sum(part["of_peer"] for part in parts.values()) == pytest.approx(0.25)


# --- a GPU's steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "MATMUL"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "MATMUL"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "ATTENTION"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", "ATTENTION"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "ATTENTION"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**)", "PACK"),
        ("at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)", "COPY_OUT"),
        ("pack_bfloat16", "PACK"),
        ("copy_out", "COPY_OUT"),
        ("Memcpy DtoD (Device -> Device)", "GROUP"),
        ("memcpy32_post", "GROUP"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "GROUP"),
        ("Memcpy HtoD (Pinned -> Device)", "POINTERS"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(", "CAST"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(", "CAST"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float, c10::BFloat16>>", "CAST"),
        (
            "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<",
            "OTHER",
        ),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>", "OTHER"),
        ("Memset (Device)", "OTHER"),
    ],
)
def test_kernels_are_told_apart_by_name(load, name, kind):
    step_profile = load("step_profile")
    assert step_profile.Kernel(name, 7, 0, 1).kind == getattr(step_profile, kind)


def kernels(step_profile, *given):
    """Kernels from (name, stream, start, stop), in milliseconds."""
    return [
        step_profile.Kernel(name, stream, int(start * 1e6), int(stop * 1e6))
        for name, stream, start, stop in given
    ]


def eager(step_profile):
    return kernels(
        step_profile,
        ("Memcpy DtoD", 20, 0, 2),  # before compute begins
        ("nvjet", 7, 1, 4),
        ("sdpa", 7, 4, 5),
        ("Memcpy DtoD", 20, 4, 6),  # half beside compute, half in its gap
        ("chunk_cat", 30, 4.5, 5.5),  # beside the lane before
        ("layer_norm", 7, 6, 7),
        ("nvjet", 20, 7, 7.5),  # a product of somebody else's
    )


def test_a_step_is_compute_its_gaps_and_what_runs_beside(load):
    step_profile = load("step_profile")
    table = step_profile.step_table(eager(step_profile), is_captured=False)
    assert table["whole"] == 7.5
    assert table["compute"] == {
        "from first to last": 6.0,
        "busy": 5.0,
        "idle": 1.0,
        "kinds": {step_profile.MATMUL: 3.0, step_profile.ATTENTION: 1.0, step_profile.OTHER: 1.0},
    }
    assert table["beside"] == {
        "busy": 4.5,
        "while compute is busy": 2.0,
        "kinds": {step_profile.MATMUL: 0.5, step_profile.GROUP: 4.0, step_profile.PACK: 1.0},
    }
    assert table["streams"] == {"7": 5.0, "20": 4.5, "30": 1.0}


def test_a_captured_steps_compute_is_all_that_does_not_just_move_bytes(load):
    step_profile = load("step_profile")
    table = step_profile.step_table(eager(step_profile), is_captured=True)
    assert table["compute"]["kinds"][step_profile.MATMUL] == 3.5
    assert table["compute"]["from first to last"] == 6.5
    assert set(table["beside"]["kinds"]) == {step_profile.GROUP, step_profile.PACK}


def test_steps_come_to_one_of_medians(load):
    median_table = load("step_profile").median_table
    steps = [{"a": 1.0, "b": {"x": 5.0}}, {"a": 9.0, "b": {"x": 1.0, "y": 2.0}}, {"a": 2.0, "b": {"y": 4.0}}]
    assert median_table(steps) == {"a": 2.0, "b": {"x": 1.0, "y": 2.0}}


def test_reasons_add_up_to_what_compute_takes_longer(load):
    step_profile = load("step_profile")
    floor = kernels(step_profile, ("nvjet", 7, 0, 2), ("sdpa", 7, 2, 2.5), ("layer_norm", 7, 3, 4))
    tables = [step_profile.step_table(each, is_captured=False) for each in (eager(step_profile), floor)]
    reasons = step_profile.longer(*tables)
    assert reasons == {step_profile.SLOWER: 1.5, step_profile.MORE: 0.0, step_profile.GAPS: 0.5}
    spans = [table["compute"]["from first to last"] for table in tables]
    assert sum(reasons.values()) == spans[0] - spans[1]
    figures = step_profile.figures({"plain": tables[1], "shardwise": tables[0]})
    assert figures["shardwise / plain: compute, busy"] == {"value": 5.0 / 3.5}


# --- on the page ------------------------------------------------------------------------------------------------------


def test_the_page_tells_of_profiles_where_there_are_any(load, tmp_path):
    report, host_profile, step_profile = load("report"), load("host_profile"), load("step_profile")
    assert report.profiles(tmp_path) == ""
    rows = [host_profile.Row("a", host_profile.GROUP, 30.0, 3.0)]
    host = {
        "benchmark": "host_profile",
        "settings": {"face": "fully_shard", "device": "cpu"},
        "figures": {"the ratio": {"value": 0.25}, "floor": {"value": 0.075}},
        "peer": "FSDP2",
        "overhead_us_a_unit": {"shardwise": 100.0, "FSDP2": 400.0},
        "parts_a_unit": host_profile.shares(rows, 100.0, 400.0),
    }
    (tmp_path / "host_profile_cpu.json").write_text(json.dumps(host))
    found = report.profiles(tmp_path)
    assert found.startswith("## Where the rest goes\n")
    assert "| `fully_shard`, CPU, beside FSDP2 | 30 (0.075) | 0 (0.000) |" in found
    assert "| 70 (0.175) | 100 (0.250) | 0.075 | [host_profile_cpu](results/host_profile_cpu.json) |" in found
    table = step_profile.step_table(eager(step_profile), is_captured=False)
    step = {
        "benchmark": "step_profile",
        "settings": {"model": "1b", "captured": True},
        "ms_a_step": {"plain": table, "shardwise": table},
        "longer_than_plain_ms": {"shardwise": step_profile.longer(table, table)},
    }
    (tmp_path / "step_profile_1b.json").write_text(json.dumps(step))
    assert (
        "| 1b, captured: shardwise | 6.00 | 6.00 | +0.00 | +0.00 | +0.00 "
        "| 4.50: matrix products 0.50, the group's own 4.00, packing 1.00 | 2.00 |"
    ) in report.profiles(tmp_path)
