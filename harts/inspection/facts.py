"""Numbers about a forest and a plan, as `harts inspect` shows them.

Shapes: N trajectories · V segments · K microbatches = slots x D replicas.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Self

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError
from harts.forest import Int, PrefixForest
from harts.planning.calls import CallPlan
from harts.planning.step import Microbatch, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestFacts:
    """Size and shape of a prefix forest."""

    trajectories: int
    raw_tokens: int
    compact_tokens: int
    roots: int
    """Trees of the forest: groups that share at least their first token."""
    segments: int
    deepest_forks: int
    """Most forks on one path from a root to a leaf. Several roots are no fork."""
    fan_out: int
    """Most segments that go on from one fork; 0 without forks."""
    forks_on_grid: int
    """Forks at a multiple of the chunk size, whose side branches replay nothing."""
    forks_off_grid: int
    duplicates: int
    """Trajectories equal to an earlier one: identical pairs count once, triples twice."""
    strict_prefixes: int
    """Trajectories that end where another goes on."""

    @classmethod
    def of(cls, forest: PrefixForest, chunk_size: int) -> Self:
        """Measure ``forest`` for a linear-attention chunk of ``chunk_size`` tokens."""
        children = child_counts(forest)
        forks = forest.segment_end[children > 0]
        on_grid = int((forks % chunk_size == 0).sum())
        equal, prefix = _repeats(forest.lengths, forest.lcp)
        return cls(
            trajectories=len(forest.members),
            raw_tokens=forest.raw_tokens,
            compact_tokens=forest.compact_tokens,
            roots=int((forest.segment_parent < 0).sum()),
            segments=len(children),
            deepest_forks=_deepest_forks(forest, children),
            fan_out=int(children.max(initial=0)),
            forks_on_grid=on_grid,
            forks_off_grid=len(forks) - on_grid,
            duplicates=equal,
            strict_prefixes=prefix,
        )

    @property
    def compression(self) -> float:
        """S/C: how many token rows trajectory-wise training has for one shared row."""
        return self.raw_tokens / self.compact_tokens


def child_counts(forest: PrefixForest) -> Int:
    """[V] segments that go on from the end of each segment."""
    parent = forest.segment_parent
    return np.bincount(parent[parent >= 0], minlength=len(parent)).astype(np.int64)


def _deepest_forks(forest: PrefixForest, children: Int) -> int:
    depth: list[int] = []
    for parent, count in zip(forest.segment_parent.tolist(), children.tolist(), strict=True):
        depth.append((depth[parent] if parent >= 0 else 0) + (count > 0))
    return max(depth, default=0)


def _repeats(lengths: Int, lcp: Int) -> tuple[int, int]:
    """Exact duplicates and strict prefixes among trajectories in lexicographic order.

    All extensions of a trajectory follow it at once, so it is a strict prefix if and only if its
    run of equal trajectories is one of the trajectory behind the run.
    """
    whole = lcp[1:] == lengths[:-1]  # the successor begins with the whole trajectory
    longer = lengths[1:] > lengths[:-1]
    duplicates = int((whole & ~longer).sum())
    prefixes, run = 0, 1
    for goes_on, is_longer in zip(whole.tolist(), longer.tolist(), strict=True):
        if goes_on and not is_longer:
            run += 1
            continue
        prefixes += run if goes_on else 0
        run = 1
    return duplicates, prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """One linear-attention call of a microbatch, or the calls of one number in a whole step."""

    microbatches: int
    sequences: int
    own_rows: int
    """Rows whose outputs the call writes; over all calls they are the compact tokens."""
    replay_rows: int
    """Ancestor rows that only update the state (part of R, Eq. 15)."""
    states: int
    """Chunk-boundary states that the call hands out to later calls."""

    def __add__(self, other: "CallFacts") -> "CallFacts":
        names = [f.name for f in fields(self)]
        return CallFacts(**{n: getattr(self, n) + getattr(other, n) for n in names})


NO_CALL = CallFacts(microbatches=0, sequences=0, own_rows=0, replay_rows=0, states=0)


def call_facts(calls: CallPlan, segment_lengths: Int) -> list[CallFacts]:
    """Facts of each call of one microbatch, in the order they run."""
    lengths = segment_lengths.tolist()
    return [
        CallFacts(
            microbatches=1,
            sequences=len(packed),
            own_rows=sum(lengths[v] for s in packed for v in s.chain),
            replay_rows=sum(s.replay[1] - s.replay[0] for s in packed),
            states=sum(len(s.boundaries) for s in packed),
        )
        for packed in calls.rounds
    ]


def step_call_facts(microbatches: Iterable[Microbatch]) -> list[CallFacts]:
    """Facts summed over the first calls of all microbatches, over their second calls, and on."""
    each = [call_facts(m.calls, m.forest.segment_lengths) for m in microbatches]
    return [sum(same, start=NO_CALL) for same in zip_longest(*each, fillvalue=NO_CALL)]


def works(plan: StepPlan) -> Int:
    """[slots, D] compact work w(M) of the microbatch that replica d runs in slot j."""
    flat = np.array([m.compact_tokens for m in plan.microbatches], np.int64)
    return flat.reshape(plan.slots, plan.replicas)


def imbalance(work: Int) -> NDArray[np.float64]:
    """I of Eq. 23 over the last axis, the replicas: excess of the heaviest over the mean."""
    mean = work.mean(axis=-1)
    return np.asarray(work.max(axis=-1) / mean - 1, np.float64)


def microbatch_of_rows(plan: StepPlan, trajectories: int) -> Int:
    """[N] number of the microbatch that holds each input row; fillers only repeat some."""
    holder = np.full(trajectories, -1, np.int64)
    for number, microbatch in enumerate(plan.microbatches):
        if not microbatch.filler:
            holder[microbatch.forest.members] = number
    return holder


def counted_work(plan: StepPlan) -> int:
    """Compact tokens of all microbatches but fillers: what the lower bound is about."""
    return sum(m.compact_tokens for m in plan.counted)


def choose_microbatch(plan: StepPlan, wanted: int | None) -> int:
    """The microbatch to show: the one asked for, or the one with most calls, then most segments.

    Raises:
        InputError: the plan has no microbatch of that number.
    """
    count = len(plan.microbatches)
    if wanted is None:
        sizes = [(len(m.calls.rounds), len(m.forest.segment_parent)) for m in plan.microbatches]
        return sizes.index(max(sizes))
    if not 0 <= wanted < count:
        raise InputError(
            f"microbatch {wanted} does not exist: this plan has {count}, numbered 0 to {count - 1} "
            f"(slot * {plan.replicas} + replica). Choose one of them with --microbatch."
        )
    return wanted
