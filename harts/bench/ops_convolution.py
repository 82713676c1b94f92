"""The convolution part of ``harts bench ops``.

The yardstick is the time to move its bytes at the bandwidth of a copy of the same array: forward
reads and writes one array, backward reads two and writes one.

Shapes: C compact rows · R physical rows · C_in channels · W convolution width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from harts.bench.gpu_trees import index_of
from harts.bench.measure import Result
from harts.bench.ops import Progress, Report, Trees, median_ms
from harts.bench.ops_delta_rule import rollout_tree
from harts.errors import HartsError
from harts.ops.convolution import tree_causal_convolution
from harts.ops.convolution.reference import convolve_tree
from harts.ops.tree_index import TreeIndex

CHANNELS = (6_144, 2_048)
"""Queries, keys and values of 16 heads of 128 in one call, or each in its own."""
WIDTH = 4
RATIO_BOUND = 1.3
ERROR_BOUND = 1.2


def measure(progress: Progress, trees: Trees | None = None) -> Report:
    """Gate, then forward and backward over the time of their bytes.

    Raises:
        HartsError: the gate failed; nothing was measured.
    """
    progress("convolution: gate against float64")
    figures: dict[str, object] = dict(gate())
    results = []
    for tree, tokens in (trees or {"": rollout_tree}).items():
        index = index_of(tokens(), "cuda")
        for channels in CHANNELS:
            progress(f"convolution: {tree or 'the rollout tree'}, {channels:,} channels")
            prefix = f"{tree}, " if tree else ""
            result, table = _timing(index, channels, prefix)
            results.append(result)
            figures[f"{prefix}{channels} channels"] = table
    return Report(results=results, figures=figures)


def _timing(index: TreeIndex, channels: int, prefix: str) -> tuple[Result, dict[str, float]]:
    x, weight = _inputs(index, channels)
    grad = torch.randn_like(x)
    copy = torch.empty_like(x)

    def forward() -> Tensor:
        return tree_causal_convolution(x, weight, index=index, activation="silu")

    def both() -> object:
        return torch.autograd.grad(forward(), (x, weight), grad)

    copied = median_ms(_replay(lambda: copy.copy_(grad)))
    forward_ms, both_ms = median_ms(_replay(forward)), median_ms(_replay(both))
    bound_ms = copied * 2.5
    result = Result(
        name=f"{prefix}convolution with silu over moving its bytes",
        value=both_ms / bound_ms,
        unit="x",
        bound=RATIO_BOUND,
        detail=(
            f"C={index.compact_rows:,}, {channels:,} channels, width {WIDTH}, bfloat16, forward "
            f"and backward: {both_ms:.3f} ms / {bound_ms:.3f} ms"
        ),
    )
    return result, {"forward_ms": forward_ms, "both_ms": both_ms, "copy_ms": copied}


def gate() -> dict[str, float]:
    """Worst ratio of an error against float64 to that of the PyTorch form, output and gradients.

    Raises:
        HartsError: it is past its bound, or two runs differ.
    """
    index = index_of(rollout_tree(rows=900), "cuda")
    x, weight = _inputs(index, 192)
    cotangent = torch.randn(x.shape, device="cuda")

    def run(form: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        out = form(*leaves)
        return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return convolve_tree(x, weight, None, index, "silu")

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return tree_causal_convolution(x, weight, index=index, activation="silu")

    want, theirs = run(plain, torch.float64), run(plain, torch.bfloat16)
    ours, again = run(fused, torch.bfloat16), run(fused, torch.bfloat16)
    if not all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)):
        raise HartsError("convolution gate: two runs differ; expected equal bits.")
    ratio = max(
        float((a - w).detach().norm() / (b - w).detach().norm())
        for a, b, w in zip(ours, theirs, want, strict=True)
    )
    if not ratio <= ERROR_BOUND:
        raise HartsError(
            f"convolution gate: an error is {ratio:.2f} x the PyTorch form's, bound {ERROR_BOUND}."
        )
    return {"worst_error_ratio": ratio}


def _inputs(index: TreeIndex, channels: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(index.rows, channels, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(channels, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.5
    return x.requires_grad_(), weight.requires_grad_()


def _replay(work: Callable[[], object]) -> Callable[[], None]:
    """Work as a graph, so that the time is the GPU's and not that of its launches."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
