"""Minimum-call planning for chunkwise linear attention (paper, section 3.3, Algorithm 1).

Shapes: V segments · B chunk length.

A packed call may hold many sequences, each from its own initial state, but a chunk-boundary
state that a call produces can start another sequence only in a later call. The plan below uses
the fewest calls possible in this model and is found in time linear in the number of segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harts.errors import PlanError

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRef:
    """The recurrent state after ``position`` tokens, made while running through ``segment``."""

    segment: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """One input sequence of a packed call: replayed ancestor tokens, then a chain of segments."""

    chain: tuple[int, ...]
    """Segments, each the direct continuation of the one before."""
    initial_state: StateRef | None
    """State to start from; None is the zero state at position 0."""
    replay: tuple[int, int]
    """Ancestor positions [lo, hi) that only update the state; hi is where the chain starts."""
    boundaries: tuple[int, ...]
    """Positions, multiples of B, whose states later calls need, ascending. A plan without replay
    asks for the sequence's end, wherever it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """Rounds of packed sequences; ``rounds[0]`` is call 1."""

    chunk_size: int
    rounds: tuple[tuple[PackedSequence, ...], ...]

    @property
    def replay_tokens(self) -> int:
        """R of Eq. 15: ancestor positions that are run through once more."""
        return sum(s.replay[1] - s.replay[0] for packed in self.rounds for s in packed)

    @property
    def sequences(self) -> tuple[PackedSequence, ...]:
        """All sequences, round by round: the physical row order of the compact layout."""
        return tuple(s for packed in self.rounds for s in packed)


def plan_calls(parent: Int, start: Int, end: Int, chunk_size: int) -> CallPlan:
    """Plan the calls of a segment forest; trees are independent and share calls by number.

    Args:
        parent: [V] parent of each segment, -1 for a root; parents come before children.
        start: [V] first position of each segment.
        end: [V] position behind each segment.
        chunk_size: B, the chunk length of the linear-attention kernel.

    Raises:
        PlanError: the arrays are not a forest of adjoining, non-empty segments.
    """
    forest = _Forest(parent, start, end, chunk_size)
    before, inside = _minimum_calls(forest)
    rounds: list[list[_OpenSequence]] = [[] for _ in range(max(before, default=0))]
    for root in forest.roots:
        first = _OpenSequence(None, (0, 0), 0)
        _recover(forest, before, inside, root, first, rounds)
    return CallPlan(
        chunk_size=chunk_size,
        rounds=tuple(tuple(s.close() for s in packed) for packed in rounds if packed),
    )


def plan_without_replay(parent: Int, start: Int, end: Int, chunk_size: int) -> CallPlan:
    """One call for each depth of the forest: every segment starts from its parent's final state.

    Right in exact arithmetic, but chunks begin at each fork instead of at multiples of B, so
    rounding differs from that of a trajectory alone. It is what the paper's No-replay is, for
    measuring what replay is worth; never train with it.
    """
    forest = _Forest(parent, start, end, chunk_size)
    depth: list[int] = []
    rounds: list[list[PackedSequence]] = []
    for segment, above in enumerate(np.asarray(parent).tolist()):
        depth.append(depth[above] + 1 if above >= 0 else 0)
        if depth[segment] == len(rounds):
            rounds.append([])
        first, last = forest.start[segment], forest.end[segment]
        rounds[depth[segment]].append(
            PackedSequence(
                chain=(segment,),
                initial_state=StateRef(segment=above, position=first) if above >= 0 else None,
                replay=(first, first),
                boundaries=(last,) if forest.children[segment] else (),
            )
        )
    return CallPlan(chunk_size=chunk_size, rounds=tuple(tuple(r) for r in rounds))


class _Forest:
    """Segments as Python lists, with children: the form that the recurrences walk."""

    def __init__(self, parent: Int, start: Int, end: Int, chunk_size: int) -> None:
        if chunk_size < 1:
            raise PlanError(f"chunk_size must be at least 1, got {chunk_size}")
        self.chunk_size = chunk_size
        self.start: list[int] = np.asarray(start).tolist()
        self.end: list[int] = np.asarray(end).tolist()
        self.roots: list[int] = []
        self.children: list[list[int]] = [[] for _ in self.start]
        for segment, above in enumerate(np.asarray(parent).tolist()):
            expected = 0 if above < 0 else self.end[above] if above < segment else None
            if expected != self.start[segment] or self.end[segment] <= self.start[segment]:
                raise PlanError(
                    f"segment {segment} spans [{self.start[segment]}, {self.end[segment]}) under "
                    f"parent {above}: expected a non-empty span that starts at {expected} and a "
                    "parent listed before it"
                )
            (self.roots if above < 0 else self.children[above]).append(segment)

    def anchor(self, position: int) -> int:
        """a(p) of Eq. 2: the nearest chunk boundary no later than ``position``."""
        return position // self.chunk_size * self.chunk_size

    def crosses_no_boundary(self, segment: int) -> bool:
        """Eq. 11, e_v < a_v + B: forks at its end can start from its entry anchor."""
        return self.end[segment] < self.anchor(self.start[segment]) + self.chunk_size


def _minimum_calls(forest: _Forest) -> tuple[list[int], list[int]]:
    """T_pre and T_in of Eq. 12-14 for every segment, children before parents."""
    before = [1] * len(forest.start)
    inside = [1] * len(forest.start)
    for v in range(len(before) - 1, -1, -1):
        children = forest.children[v]
        if not children:
            continue
        largest = max(children, key=before.__getitem__)
        runner_up = max((before[u] for u in children if u != largest), default=0)
        inside[v] = min(
            max(inside[o], 1 + (runner_up if o == largest else before[largest])) for o in children
        )
        before[v] = before[largest] if forest.crosses_no_boundary(v) else inside[v]
    return before, inside


@dataclass(slots=True)
class _OpenSequence:
    initial_state: StateRef | None
    replay: tuple[int, int]
    round: int
    chain: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)

    def request(self, position: int) -> None:
        """Ask for a boundary state once; calls come in ascending order along the chain."""
        if not self.boundaries or self.boundaries[-1] != position:
            self.boundaries.append(position)

    def close(self) -> PackedSequence:
        return PackedSequence(
            chain=tuple(self.chain),
            initial_state=self.initial_state,
            replay=self.replay,
            boundaries=tuple(self.boundaries),
        )


@dataclass(slots=True)
class _Visit:
    """One call of the paper's Recover(v, ready, K_round, r, q)."""

    segment: int
    ready: bool
    budget: int
    sequence: _OpenSequence
    anchor: StateRef | None
    """The latest boundary state on the path, up to the segment's start."""


def _recover(
    forest: _Forest,
    before: Sequence[int],
    inside: Sequence[int],
    root: int,
    first: _OpenSequence,
    rounds: list[list[_OpenSequence]],
) -> None:
    """Recover of Algorithm 1 with an explicit stack: a direct continuation is visited first."""
    stack = [_Visit(root, True, before[root], first, None)]
    while stack:
        visit = stack.pop()
        v, sequence, anchor = visit.segment, visit.sequence, visit.anchor
        if not sequence.chain:
            rounds[sequence.round].append(sequence)
        sequence.chain.append(v)
        boundary = forest.anchor(forest.end[v])
        if boundary > forest.start[v]:
            anchor = StateRef(segment=v, position=boundary)
        children = forest.children[v]
        if not children:
            continue
        same = visit.ready and forest.crosses_no_boundary(v)
        side_budget = visit.budget - (0 if same else 1)
        direct = _direct_continuation(
            children, before, before if same else inside, visit.budget, side_budget
        )
        replay = (boundary, forest.end[v])
        if not same and len(children) > 1:
            sequence.request(boundary)
        for u in reversed(children):
            if u != direct:
                side = _OpenSequence(anchor, replay, sequence.round + (0 if same else 1))
                stack.append(_Visit(u, True, side_budget, side, anchor))
        stack.append(_Visit(direct, same, visit.budget, sequence, anchor))


def _direct_continuation(
    children: Sequence[int],
    before: Sequence[int],
    own: Sequence[int],
    budget: int,
    side_budget: int,
) -> int:
    """First child that fits the budget itself and leaves no other child over the side budget."""
    over = sum(before[u] > side_budget for u in children)
    return next(o for o in children if own[o] <= budget and over - (before[o] > side_budget) == 0)
