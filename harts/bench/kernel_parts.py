"""GPU time by part of a model, from the names of its kernels."""

import re
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

_PATTERNS = {
    "log-probs": r"_row_sums_kernel|_gradient_kernel|_target_logits_kernel|_overwrite_kernel",
    "convolution": r"^_(forward|backward|finish)_kernel|conv1d",
    "attention": r"flash|fmha|attention|_(gather|add|fold|merge)_rows_kernel|cudnn_generated",
    "delta rule": r"state_(forward|backward)|scalar_gate|fold_copies|kda|gla_|gated_delta|chunk_"
    r"|recompute_w_u|solve_tril|merge_16x16|wy_",
    "experts": r"[Gg]roup(ed|Problem)|grouped_mm|group_gemm",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitK|cublas",
}
PARTS = (*_PATTERNS, "other")
"""Parts in the order in which a kernel's name is tried; what no pattern knows is "other"."""


def part_of(kernel: str) -> str:
    """The part of the model that a kernel of this name belongs to."""
    return next((part for part, known in _PATTERNS.items() if re.search(known, kernel)), "other")


def part_times(run: Callable[[], None]) -> dict[str, float]:
    """Seconds of GPU kernels by part while ``run`` runs once."""
    return {part: sum(seconds.values()) for part, seconds in kernel_times(run).items()}


def kernel_times(run: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Part -> kernel name -> seconds, while ``run`` runs once."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    for event in profiler.key_averages():
        # What torch.compile annotates spans kernels that are counted themselves.
        annotation = event.key.startswith("## ")
        if event.device_type.name == "CUDA" and not annotation:
            kernels = found[part_of(event.key)]
            kernels[event.key] = kernels.get(event.key, 0.0) + event.self_device_time_total / 1e6
    return found
