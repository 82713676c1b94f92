"""The log-prob part of ``harts bench ops``.

The yardstick is the same four matrix products alone, through cuBLAS, in the same tiles.

Shapes: C compact rows · S positions · D model width · A vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from harts.bench.gpu_trees import index_of
from harts.bench.measure import Result
from harts.bench.ops import Progress, Report, Trees, median_ms
from harts.errors import HartsError
from harts.ops.logprobs import mapped_logprobs
from harts.ops.logprobs.shards import BLOCK_ROWS

ROWS, VOCABULARY, WIDTH = 65_536, 157_184, 1_536
POSITIONS = 369_202
RATIO_BOUND = 1.15
REUSE_BOUND = 1.03
PEAK_GB = 2.0
LOGPROB_ERROR = 1e-6
GRADIENT_ERROR = 1.2


def measure(progress: Progress, trees: Trees | None = None) -> Report:
    """Gate, then time, memory and the price of more positions than rows.

    Raises:
        HartsError: the gate failed; nothing was measured.
    """
    progress("log-probs: gate against float64")
    figures: dict[str, object] = dict(gate())
    results: list[Result] = []
    if trees is None:
        progress("log-probs: random positions")
        rows = torch.arange(ROWS, device="cuda")
        many = torch.randint(0, ROWS, (POSITIONS - ROWS,), device="cuda")
        found, figures["random positions"] = _timing(
            "", rows, torch.cat([rows, many]).sort().values, None
        )
        return Report(results=found, figures=figures)
    for name, tokens in trees.items():
        progress(f"log-probs: {name}")
        index = index_of(tokens(), "cuda")
        once = torch.unique(index.target_rows)
        found, figures[name] = _timing(f"{name}, ", once, index.target_rows, index.targets)
        results += found
    return Report(results=results, figures=figures)


def _timing(
    prefix: str, once: Tensor, positions: Tensor, targets: Tensor | None
) -> tuple[list[Result], dict[str, float]]:
    """Results for rows read once and for all positions, whose targets are random unless given."""
    hidden, weight = _inputs(ROWS, VOCABULARY, WIDTH)
    steps = {"C": _step(hidden, weight, once), "S": _step(hidden, weight, positions, targets)}
    times = {name: median_ms(step, repeats=7, warm_up=2) for name, step in steps.items()}
    peak = _extra_gb(steps["C"])
    alone = median_ms(lambda: products_alone(hidden.detach(), weight.detach()), 7, 2)
    detail = f"C={ROWS:,}, vocabulary {VOCABULARY:,}, D={WIDTH:,}, bfloat16, forward and backward"
    results = [
        Result(
            name=f"{prefix}log-probs over the four matrix products alone",
            value=times["C"] / alone,
            unit="x",
            bound=RATIO_BOUND,
            detail=f"{detail}: {times['C']:.1f} ms / {alone:.1f} ms",
        ),
        Result(
            name=f"{prefix}log-probs of {len(positions):,} positions over those of C",
            value=times["S"] / times["C"],
            unit="x",
            bound=REUSE_BOUND,
            detail=f"{times['S']:.1f} ms / {times['C']:.1f} ms",
        ),
        Result(
            name=f"{prefix}log-probs, peak extra memory, gradients included",
            value=peak,
            unit="GB",
            bound=PEAK_GB,
            detail=detail,
        ),
    ]
    return results, {"c_ms": times["C"], "s_ms": times["S"], "products_ms": alone}


def gate() -> dict[str, float]:
    """Errors against float64: log-probs absolutely, gradients over those of plain bfloat16.

    Raises:
        HartsError: an error is past its bound, or two runs differ.
    """
    hidden, weight = _inputs(700, 1_999, 320)
    rows = torch.randint(0, 700, (3_000,), device="cuda")
    targets = torch.randint(0, 1_999, (3_000,), device="cuda")
    cotangent = torch.randn(3_000, device="cuda")

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(dtype).log_softmax(-1)[rows, targets]

    def run(form: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
        out = form(*leaves)
        return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]

    def mapped(hidden: Tensor, weight: Tensor) -> Tensor:
        return mapped_logprobs(hidden, weight, rows, targets)

    want = run(plain, torch.float64)
    theirs = run(plain, torch.bfloat16)
    ours, again = run(mapped, torch.bfloat16), run(mapped, torch.bfloat16)
    if not all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)):
        raise HartsError("log-probs gate: two runs differ; expected equal bits.")
    error = float((ours[0] - want[0]).detach().norm() / want[0].detach().norm())
    ratios = [
        float((a - w).norm() / (b - w).norm())
        for a, b, w in zip(ours[1:], theirs[1:], want[1:], strict=True)
    ]
    if not (error <= LOGPROB_ERROR and max(ratios) <= GRADIENT_ERROR):
        raise HartsError(
            f"log-probs gate: relative error {error:.1e}, bound {LOGPROB_ERROR:.0e}; gradients' "
            f"errors over plain bfloat16's {ratios}, bound {GRADIENT_ERROR}."
        )
    return {
        "logprob_error": error,
        "hidden_error_ratio": ratios[0],
        "weight_error_ratio": ratios[1],
    }


def products_alone(hidden: Tensor, weight: Tensor) -> None:
    """Logits twice, and the two products of backward, tile by tile, overwriting their results."""
    tile = hidden.new_empty(BLOCK_ROWS * BLOCK_ROWS)
    by_row, by_token = torch.empty_like(hidden), torch.empty_like(weight)
    for v in range(0, len(weight), BLOCK_ROWS):
        w = weight[v : v + BLOCK_ROWS]
        for r in range(0, len(hidden), BLOCK_ROWS):
            h = hidden[r : r + BLOCK_ROWS]
            logits = tile[: len(h) * len(w)].view(len(h), len(w))
            for _ in range(2):
                torch.mm(h, w.t(), out=logits)
            torch.mm(logits, w, out=by_row[r : r + len(h)])
            torch.mm(logits.t(), h, out=by_token[v : v + len(w)])


def _inputs(rows: int, vocabulary: int, width: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.05).bfloat16()
    return hidden.requires_grad_(), weight.requires_grad_()


def _step(
    hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor | None = None
) -> Callable[[], object]:
    if targets is None:
        targets = torch.randint(0, len(weight), (len(hidden),), device="cuda")[rows]
    cotangent = torch.randn(len(rows), device="cuda")

    def step() -> object:
        out = mapped_logprobs(hidden, weight, rows, targets)
        return torch.autograd.grad(out, (hidden, weight), cotangent)

    return step


def _extra_gb(step: Callable[[], object]) -> float:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9
