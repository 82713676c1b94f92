"""The delta-rule part of ``harts bench ops``.

The yardstick is what the same rows cost as plain sequences, so that only the tree can be slower.

Shapes: C compact rows · S rows trajectory by trajectory · R physical rows · H query/key heads ·
G value heads · K key dim · V value dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.bench.measure import Result
from harts.bench.ops import Progress, Report, Trees, median_ms, peak_gib
from harts.forest import PrefixForest
from harts.layout import build_layout
from harts.ops.delta_rule import Backend, chunk_delta_rule, tree_delta_rule
from harts.ops.tree_index import TreeIndex
from harts.planning.calls import plan_calls
from harts.trajectories import from_lists

ROWS = 65_536
LEAVES = 50
PLAIN_SEQUENCES = 60
CHUNK = 64
LOWEST = -5.0
PEAK_GIB = 14.0
RATIO_BOUND = 1.15
ERROR_BOUND = 1.2

Inputs = list[Tensor]
Run = Callable[[Inputs], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads of one linear-attention layer."""

    heads: int
    groups: int
    dim: int
    by_channel: bool


SHAPES = {
    "KDA H=16 K=V=128": Shape(heads=16, groups=16, dim=128, by_channel=True),
    "GDN H=16 G=32 K=V=128": Shape(heads=16, groups=32, dim=128, by_channel=False),
}


def rollout_tree(rows: int = ROWS, leaves: int = LEAVES, seed: int = 2) -> list[NDArray[np.int32]]:
    """Trajectories of one binary rollout tree with so many compact rows.

    The default has C = 65,536, S = 368,303, 50 leaves, 99 segments, 6 rounds, 2.3% replay.
    """
    generator = np.random.default_rng(seed)
    sizes: list[float] = []
    paths: list[list[int]] = []

    def grow(below: int, path: list[int]) -> None:
        sizes.append(generator.gamma(2.0) * below**0.4)
        here = [*path, len(sizes) - 1]
        if below == 1:
            paths.append(here)
            return
        left = int(np.clip(round(below * generator.uniform(0.4, 0.6)), 1, below - 1))
        grow(left, here)
        grow(below - left, here)

    grow(leaves, [])
    weights = np.array(sizes)
    lengths = np.maximum(1, np.floor(weights / weights.sum() * rows)).astype(int)
    lengths[0] += rows - lengths.sum()
    return [np.concatenate([np.full(lengths[s], s, np.int32) for s in path]) for path in paths]


def tree_on_gpu(trajectories: list[NDArray[np.int32]]) -> tuple[TreeIndex, list[Tensor]]:
    """The tree's index, and the compact rows of every trajectory but its last, on the GPU."""
    batch = from_lists(token_ids=trajectories)
    forest = PrefixForest.build(batch)
    calls = plan_calls(forest.segment_parent, forest.segment_start, forest.segment_end, CHUNK)
    index = TreeIndex.from_layout(build_layout(batch, forest, calls), "cuda")
    bounds = index.trajectory_offsets.tolist()
    return index, [index.target_rows[start:end] for start, end in pairwise(bounds)]


def make_inputs(shape: Shape, rows: int, seed: int = 0, slow: bool = True) -> Inputs:
    """query, key, value, log_decay and beta as a layer hands them over, requiring gradients."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    decay_size = (rows, shape.groups, shape.dim) if shape.by_channel else (rows, shape.groups)
    fastest = 0.01 if slow else -LOWEST
    columns = [
        torch.nn.functional.normalize(normal(rows, shape.heads, shape.dim), dim=-1).bfloat16(),
        torch.nn.functional.normalize(normal(rows, shape.heads, shape.dim), dim=-1).bfloat16(),
        normal(rows, shape.groups, shape.dim).bfloat16(),
        -fastest * normal(*decay_size).sigmoid(),
        normal(rows, shape.groups).sigmoid().bfloat16(),
    ]
    return [x.requires_grad_() for x in columns]


def packed(inputs: Inputs, lengths: list[int]) -> Tensor:
    """Plain packed sequences through our own form."""
    starts = torch.tensor([0, *accumulate(lengths)])
    output: Tensor = chunk_delta_rule(
        *inputs, cu_seqlens=starts, chunk_size=CHUNK, lowest_log_decay=LOWEST, backend="split"
    ).output
    return output


def plain_fla(inputs: Inputs, lengths: list[int]) -> Tensor:
    """Plain packed sequences through fla's public function, tuned by itself."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    query, key, value, log_decay, beta = (x.unsqueeze(0) for x in inputs)
    starts = torch.tensor([0, *accumulate(lengths)], device="cuda")
    if log_decay.dim() == 4:
        output, _ = chunk_kda(query, key, value, log_decay, beta, cu_seqlens=starts, safe_gate=True)
    else:
        output, _ = chunk_gated_delta_rule(query, key, value, log_decay, beta, cu_seqlens=starts)
    result: Tensor = output.squeeze(0)
    return result


def trajectories_of(inputs: Inputs, paths: list[Tensor]) -> Inputs:
    """The same rows written out trajectory by trajectory, [S, ...]."""
    rows = torch.cat(paths)
    return [x.detach()[rows].requires_grad_() for x in inputs]


def both_ways(run: Run, inputs: Inputs) -> Callable[[], list[Tensor]]:
    """Forward, and backward to all inputs, under fixed upstream gradients."""
    with torch.no_grad():
        upstream = torch.randn_like(run(inputs))

    def work() -> list[Tensor]:
        output = run(inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]

    return work


def check_tree(shape: Shape, index: TreeIndex, paths: list[Tensor]) -> tuple[float, int]:
    """Share of the output equal to trajectory-wise's, and how many results repeat, bit for bit.

    The least share, and the count of output and gradients, over slow and fast gates; NaN is
    never equal.
    """
    rows, equal, repeated = torch.cat(paths), [], 0
    for slow in (True, False):
        inputs = make_inputs(shape, index.rows, slow=slow)
        work = both_ways(tree_run(index, "split"), inputs)
        # What uninitialised tensors will get: an entry that no kernel writes shows as NaN.
        torch.cuda.empty_cache()
        torch.full((3 << 30,), torch.nan, device="cuda")
        first, second = work(), work()
        repeated += sum(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with torch.no_grad():
            alone = packed(trajectories_of(inputs, paths), [len(path) for path in paths])
        # Counted in integers: the mean of very many ones can round to less than one.
        equal.append(int((first[0][rows] == alone).sum()) / alone.numel())
    return min(equal), repeated


def gradient_errors(shape: Shape) -> float:
    """Worst ratio of our error to trajectory-wise's own, output and gradients, in a small tree.

    Both against float64 through the PyTorch form; trajectory-wise gradients are added up exactly.
    """
    index, paths = tree_on_gpu(rollout_tree(rows=4_096, leaves=10))
    lengths, rows = [len(path) for path in paths], torch.cat(paths)
    # One copy of each row carries the row's loss; rows that predict nothing carry none.
    owner = torch.full((index.rows,), -1, device="cuda")
    owner[rows] = torch.arange(len(rows), device="cuda")
    mask = (owner[rows] == torch.arange(len(rows), device="cuda"))[:, None, None]
    small = Shape(
        heads=2, groups=2 * shape.groups // shape.heads, dim=shape.dim, by_channel=shape.by_channel
    )
    inputs = make_inputs(small, index.rows)
    upstream = torch.randn_like(inputs[2]) * (owner >= 0)[:, None, None]

    def tree(columns: Inputs, backend: Backend) -> Inputs:
        output = tree_run(index, backend)(columns)
        gradients = torch.autograd.grad(output, columns, upstream.to(output.dtype))
        return [output.detach() * (owner >= 0)[:, None, None], *gradients]

    exact = tree([x.detach().double().requires_grad_() for x in inputs], "reference")
    expanded = trajectories_of(inputs, paths)
    output = packed(expanded, lengths)
    gradients = torch.autograd.grad(output, expanded, upstream[rows] * mask)
    alone = [
        torch.zeros_like(reference).index_add_(0, rows, x.detach().double())
        for reference, x in zip(exact, (output * mask, *gradients), strict=True)
    ]
    ratios = [
        float((ours.double() - reference).norm() / (theirs - reference).norm())
        for ours, theirs, reference in zip(tree(inputs, "split"), alone, exact, strict=True)
    ]
    return max(ratios)


def tree_run(index: TreeIndex, backend: Backend) -> Run:
    """The tree through one backend."""

    def run(inputs: Inputs) -> Tensor:
        return tree_delta_rule(*inputs, index=index, lowest_log_decay=LOWEST, backend=backend)

    return run


def kernel_ms(work: Callable[[], object], repeats: int = 3) -> float:
    """Milliseconds that GPU kernels and copies run, without the gaps between them."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return float(sum(event.self_device_time_total for event in events) / 1e3 / repeats)


def measure(progress: Progress, trees: Trees | None = None) -> Report:
    """Gate, then measure both rules; a rule that fails its gate is reported and not timed."""
    results: list[Result] = []
    figures: dict[str, object] = {}
    for tree, tokens in (trees or {"": rollout_tree}).items():
        index, paths = tree_on_gpu(tokens())
        prefix = f"{tree}, " if tree else ""
        figures |= {
            f"{prefix}compact_rows": index.compact_rows,
            f"{prefix}trajectory_rows": sum(len(path) for path in paths),
            f"{prefix}rounds": len(index.rounds),
            f"{prefix}packed_rows": sum(packed.packed_rows.numel() for packed in index.rounds),
        }
        for rule, shape in SHAPES.items():
            name = f"{prefix}{rule}"
            progress(f"{name}: gate")
            gate = _gate(name, shape, index, paths)
            results += gate
            if not all(result.passed for result in gate):
                continue
            progress(f"{name}: timings")
            table = _timings(shape, index, paths)
            figures[name] = table
            results += _results(name, table)
    return Report(results=results, figures=figures)


def _gate(name: str, shape: Shape, index: TreeIndex, paths: list[Tensor]) -> list[Result]:
    equal, repeated = check_tree(shape, index, paths)
    return [
        Result(
            name=f"{name}: output equal to trajectory-wise, bit for bit",
            value=equal,
            unit="share",
            bound=1.0,
            at_least=True,
        ),
        Result(
            name=f"{name}: results that repeat bit for bit, of 6 with slow and 6 with fast gates",
            value=repeated,
            unit="results",
            bound=12.0,
            at_least=True,
        ),
        Result(
            name=f"{name}: worst float64 error over trajectory-wise's own",
            value=gradient_errors(shape),
            unit="x",
            bound=ERROR_BOUND,
        ),
    ]


def _timings(
    shape: Shape, index: TreeIndex, paths: list[Tensor]
) -> dict[str, dict[str, float | str]]:
    """Milliseconds and GiB of every way to run the same work."""
    inputs = make_inputs(shape, index.rows)
    step = -(-index.compact_rows // PLAIN_SEQUENCES)
    plain = [min(step, index.compact_rows - first) for first in range(0, index.compact_rows, step)]
    lengths = [len(path) for path in paths]
    ways: dict[str, tuple[Run, Inputs | None]] = {
        "yardstick, fla": (lambda x: plain_fla(x, plain), inputs),
        "yardstick, own": (lambda x: packed(x, plain), inputs),
        "split": (tree_run(index, "split"), inputs),
        "rounds": (tree_run(index, "rounds"), inputs),
        "trajectory-wise": (lambda x: packed(x, lengths), None),
    }
    table: dict[str, dict[str, float | str]] = {}
    for name, (run, columns) in ways.items():
        table[name] = _timing(run, trajectories_of(inputs, paths) if columns is None else columns)
    return table


def _timing(run: Run, inputs: Inputs) -> dict[str, float | str]:
    try:
        work = both_ways(run, inputs)
        work()
    except RuntimeError as error:
        # fla refuses its own Gated DeltaNet backward on Hopper with Triton before 3.7.1.
        return {"refused": str(error).splitlines()[0]}

    def forward() -> None:
        with torch.no_grad():
            run(inputs)

    return {
        "forward_ms": median_ms(forward),
        "both_ms": median_ms(work),
        "kernels_ms": kernel_ms(work),
        "peak_gib": peak_gib(work),
    }


def _results(name: str, table: dict[str, dict[str, float | str]]) -> list[Result]:
    split = table["split"]
    ruler = "yardstick, own" if "refused" in table["yardstick, fla"] else "yardstick, fla"
    ratios = {
        key: float(split[key]) / float(table[ruler][key]) for key in ("both_ms", "kernels_ms")
    }
    detail = f"{split['both_ms']:.2f} ms, {ruler} {table[ruler]['both_ms']:.2f} ms"
    return [
        Result(
            name=f"{name}: forward + backward over yardstick",
            value=ratios["both_ms"],
            unit="x",
            bound=RATIO_BOUND,
            detail=detail,
        ),
        Result(
            name=f"{name}: the same, kernels only",
            value=ratios["kernels_ms"],
            unit="x",
            bound=RATIO_BOUND,
        ),
        Result(
            name=f"{name}: peak memory", value=float(split["peak_gib"]), unit="GiB", bound=PEAK_GIB
        ),
    ]
