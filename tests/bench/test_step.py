"""``harts bench step``: what it counts, and that it runs; only a GPU gives its times a meaning."""

import pytest

from harts.bench.kernel_parts import part_of
from harts.bench.step import (
    Side,
    StepBench,
    fullest,
    measure_steps,
    model_named,
    query_key_pairs,
    work_ideal_speedup,
)
from harts.errors import InputError
from harts.planning.step import plan_step
from harts.synth import synthesize
from tests.forests import batch_of


def test_query_key_pairs_count_every_ancestor_and_the_row_itself() -> None:
    batch = batch_of([[1, 2, 3, 4], [1, 2, 9]])
    shared = plan_step(batch, replicas=1, capacity=100)
    alone = plan_step(batch, replicas=1, capacity=100, share=False)
    assert query_key_pairs(alone) == (1 + 2 + 3 + 4) + (1 + 2 + 3)
    assert query_key_pairs(shared) == (1 + 2 + 3 + 4) + 3


def side(share: bool, seconds: float, parts: dict[str, float]) -> Side:
    batch = batch_of([[1, 2, 3, 4], [1, 2, 9]])
    return Side(
        plan=plan_step(batch, replicas=1, capacity=100, share=share),
        seconds=seconds,
        planning_s=0.0,
        peak_bytes=0,
        parts_s=parts,
    )


def test_work_ideal_divides_each_part_by_its_own_ratio() -> None:
    sides = {
        "compact": side(True, 1.0, {}),
        "trajectory-wise": side(False, 10.0, {"attention": 4.0, "matrix products": 5.0}),
    }
    rows, pairs = 7 / 5, 16 / 13
    assert work_ideal_speedup(sides) == pytest.approx(10 / (4 / pairs + 5 / rows + 1 / rows))


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_tst_128x256_64x6_2x1_v_bz_coopA_TNT", "matrix products"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<"
         "cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<", "experts"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<", "attention"),
        ("state_backward", "delta rule"),
        ("chunk_kda_bwd_kernel_wy_dqkg_fused", "delta rule"),
        ("_backward_kernel", "convolution"),
        ("_row_sums_kernel", "log-probs"),
        ("triton_poi_fused__to_copy_add_index_select_0", "other"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl", "other"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_small_steps_are_measured_in_both_ways() -> None:
    batch = synthesize("tiny", 0)
    sample = fullest(batch, 1_000, 1)
    bench = StepBench(
        model=model_named("small", int(batch.tokens.max()) + 1, "cpu"),
        device="cpu",
        capacity=1_000,
        repeats=1,
    )
    workloads = {"one": batch, "other": synthesize("tiny", 1)}
    results, everything = measure_steps(workloads, bench, lambda _: None)
    figures = everything["one"]
    assert figures["raw_tokens"] == sample.raw_tokens == figures["trajectory-wise"]["rows"]
    assert figures["compact"]["rows"] <= 1_000
    assert figures["row_compression"] > 1.5
    kinds = ["F/B/Grad", "Core"]
    assert [tuple(r.name.split()[:2]) for r in results] == [
        (f"{name}:", kind) for name in workloads for kind in kinds
    ]


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="table-1 or small, got 'large'"):
        model_named("large", 10, "cpu")
    with pytest.raises(InputError, match="must be one of"):
        StepBench(model=model_named("small", 10, "cpu"), device="cpu", recompute="some")
    with pytest.raises(InputError, match="cpu or cuda, got 'tpu'"):
        model_named("small", 10, "tpu")
