"""What a step allocates and sends: no logits, nothing expanded, traffic that shrinks with rows.

One dispatch mode sees every operation of a process, forward, recomputed and backward, its
collective and point-to-point ones included. Sizes differ from each other, so that a shape tells
what a tensor is.

Shapes: S semantic positions · P log-prob positions · C compact rows · D model width · A vocabulary.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip(
    "megatron.core", reason="needs megatron-core, which pip install 'harts[megatron]' brings"
)

from harts.objectives import GRPO, prepare_step
from harts.planning.step import StepPlan, plan_step
from harts.training.step import RouterLosses
from tests.forests import hard_tree
from tests.megatron.cpu import megatron_on_cpu
from tests.megatron.grid import Case, grid, processes, settings
from tests.megatron.small import small_config

PROCESSES = 2
VOCABULARY = 1_009
HEAD_ROWS = 64
"""Rows of logits that may be held at once here; 16,384 on a GPU."""
NARROWEST = 8
"""Of anything that is as wide as an activation."""
CASES = {
    "TP2": Case(tp=2, recompute=True),
    "PP2": Case(pp=2),
    "CP2": Case(cp=2, recompute=True),
    "DP2 EP2": Case(dp=2, ep=2, recompute=True),
}
BATCH = hard_tree(VOCABULARY)


@dataclass(kw_only=True)
class Recorded:
    """What one process saw in one step."""

    shapes: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Of every tensor that an operation made, with one such operation."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that went into each kind of collective operation, but for those that do not depend on
    rows: gradients at the end, and the outcome."""


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Recorded()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.found.shapes.setdefault(tuple(tensor.shape), name)
        if name.startswith("c10d.") and "recv" not in name and self.counting:
            inputs = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
            bytes_ = sum(t.numel() * t.element_size() for t in inputs)
            self.found.sent[name] = self.found.sent.get(name, 0) + bytes_
        return made

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        self.counting = False
        yield
        self.counting = True

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.not_counting():
                return function(*args, **kwargs)

        return called


def plan_of(case: Case, *, share: bool) -> StepPlan:
    """One microbatch a replica, so that only rows differ."""
    return plan_step(BATCH, replicas=case.dp, capacity=10_000, share=share, planner="contiguous")


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """The head takes as many rows at once as are far fewer than C."""
    import harts.megatron.head as head
    import harts.ops.logprobs.reference as reference

    cut: dict[str, Any] = {
        name: partial(getattr(head, name), block_rows=HEAD_ROWS)
        for name in ("vocabulary_partial", "vocabulary_gradients")
    }
    with (
        mock.patch.multiple(head, **cut),
        mock.patch.object(reference, "_BLOCK_BYTES", HEAD_ROWS * VOCABULARY * 4),
    ):
        yield


def logits_kept() -> AbstractContextManager[Any]:
    from harts.megatron.head import LogprobHead

    right = LogprobHead._own

    def wrong(self: Any, hidden: Any, rows: Any, targets: Any) -> Any:
        logits = hidden @ self.weight.t()
        return right(self, hidden, rows, targets) + 0 * logits.sum()

    return mock.patch.object(LogprobHead, "_own", wrong)


def activations_expanded() -> AbstractContextManager[Any]:
    from harts.megatron.head import LogprobHead

    right = LogprobHead._own

    def wrong(self: Any, hidden: Any, rows: Any, targets: Any) -> Any:
        return right(self, hidden[rows], torch.arange(len(rows)), targets)

    return mock.patch.object(LogprobHead, "_own", wrong)


MUTATIONS = {"logits kept": logits_kept, "activations expanded": activations_expanded}


def run_process(rank: int, folder: str) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    runs = [(n, c, share, None) for n, c in CASES.items() for share in (True, False)]
    runs += [(name, CASES["TP2"], True, name) for name in MUTATIONS]
    for number, (name, case, share, mutation) in enumerate(runs):
        broken = MUTATIONS[mutation]() if mutation else contextlib.nullcontext()
        with (
            processes(rank, PROCESSES, f"{folder}/store{number}"),
            megatron_on_cpu(float64=False),
            grid(case),
            small_blocks(),
            broken,
        ):
            found = record(case, plan_of(case, share=share))
        torch.save(found, f"{folder}/{name}.{share}.{rank}.pt")


def record(case: Case, plan: StepPlan) -> Recorded:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from harts.megatron import MegatronEngine, build_model, transformer_config

    source = small_config()
    source.vocab_size = VOCABULARY
    config = transformer_config(source, **settings(replace(case, dtype=torch.float32)))
    recorder = Recorder()
    config.finalize_model_grads_func = recorder.apart(finalize_model_grads)
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), chunk).train()
        for chunk in build_model(source, config)
    ]
    engine = MegatronEngine(chunks)
    engine._outcome = recorder.apart(engine._outcome)  # type: ignore[method-assign]
    targets = prepare_step(BATCH, GRPO())
    with recorder:
        engine.run_step(BATCH, plan, targets, GRPO(), RouterLosses())
    return recorder.found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("volume")
    mp.spawn(run_process, (str(made),), nprocs=PROCESSES)
    return made


def recorded(folder: Path, name: str, *, share: bool = True) -> list[Recorded]:
    return [
        torch.load(folder / f"{name}.{share}.{rank}.pt", weights_only=False)
        for rank in range(PROCESSES)
    ]


def logits(case: Case, found: Recorded) -> list[str]:
    """Tensors over the vocabulary with more rows than the head may hold, weights aside."""
    width = small_config().hidden_size
    held = {VOCABULARY} | {-(-VOCABULARY // case.tp), VOCABULARY // case.tp}
    return [
        f"{operation} {shape}"
        for shape, operation in found.shapes.items()
        for a in held & set(shape)
        if torch.Size(shape).numel() > a * HEAD_ROWS and width not in shape
    ]


def expanded(case: Case, found: Recorded) -> list[str]:
    """Tensors with a row for each position, as wide as an activation."""
    positions = set()
    for microbatch in plan_of(case, share=True).microbatches:
        tokens = int(BATCH.lengths[microbatch.members].sum())
        if tokens > 2 * microbatch.compact_tokens:  # else there is little to tell apart
            positions |= {tokens, tokens - len(microbatch.members)}
    positions |= {BATCH.raw_tokens, BATCH.raw_tokens - len(BATCH)}
    return [
        f"{operation} {shape}"
        for shape, operation in found.shapes.items()
        for count in positions & set(shape)
        if torch.Size(shape).numel() >= count * NARROWEST
    ]


@pytest.mark.parametrize("name", CASES)
def test_no_rank_holds_logits_or_expanded_activations(folder: Path, name: str) -> None:
    for found in recorded(folder, name):
        assert len(found.shapes) > 100
        assert logits(CASES[name], found) == []
        assert expanded(CASES[name], found) == []


def test_kept_logits_are_seen(folder: Path) -> None:
    assert all(logits(CASES["TP2"], found) for found in recorded(folder, "logits kept"))


def test_expanded_activations_are_seen(folder: Path) -> None:
    assert all(expanded(CASES["TP2"], f) for f in recorded(folder, "activations expanded"))


@pytest.mark.parametrize("name", CASES)
def test_traffic_shrinks_as_rows_do(folder: Path, name: str) -> None:
    rows = [plan_of(CASES[name], share=share).objective.total_work for share in (True, False)]
    sent = [
        sum(sum(found.sent.values()) for found in recorded(folder, name, share=share))
        for share in (True, False)
    ]
    assert sent[0] > rows[0] * small_config().hidden_size
    assert sent[1] / sent[0] == pytest.approx(rows[1] / rows[0], rel=0.02)
