"""Check a plan against its batch, whatever made the plan: every invariant, each once.

Nothing here uses the code that plans. Sorting and longest common prefixes (LCP) are proved on the
tokens, segments are derived once more from those, and works, replays and J are summed anew. Time
is linear in tokens and segments, but for one sort of the whole batch.

Shapes: S semantic positions · N trajectories · K microbatches · V segments of one microbatch ·
B chunk length.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from harts.errors import PlanError
from harts.forest import Int, PrefixForest, sorted_prefixes
from harts.planning.calls import CallPlan, PackedSequence
from harts.planning.step import Microbatch, StepPlan
from harts.trajectories import TrajectoryBatch

State = tuple[int, int]
"""A boundary state: the segment in which it was made, and its position."""


def verify_plan(plan: StepPlan, batch: TrajectoryBatch) -> None:
    """Check that ``plan`` is a valid plan of ``batch``.

    The invariants, by the names that errors use: settings, coverage, fillers, grid, members,
    sorting, shared prefixes, segments, capacity, chains, every segment once, replay, initial state,
    requests, raw tokens, merged tokens, objective, lower bound.

    Raises:
        PlanError: the first invariant that does not hold, where, what was expected and what came.
    """
    for name in ("replicas", "capacity", "chunk_size"):
        if getattr(plan, name) < 1:
            refuse("settings", name, "at least 1", getattr(plan, name))
    working = {k: m.members.tolist() for k, m in enumerate(plan.microbatches) if not m.filler}
    check_coverage(working, len(batch))
    _check_fillers(plan, len(batch))
    _check_grid(plan)
    # A plan of trajectory-wise training, where nothing is shared, is known by this equality.
    share = plan.merged_tokens != plan.raw_tokens
    for k, microbatch in enumerate(plan.microbatches):
        where = describe(k, microbatch)
        _check_forest(where, microbatch.forest, batch, share=share)
        if microbatch.compact_tokens > plan.capacity:
            refuse(
                "capacity",
                where,
                f"at most {plan.capacity:,} compact tokens",
                f"{microbatch.compact_tokens:,}",
            )
        _check_calls(where, microbatch.forest, microbatch.calls, plan.chunk_size)
    _check_totals(plan, batch, share=share)


def refuse(invariant: str, where: str, expected: object, got: object) -> NoReturn:
    """Raise the PlanError of an invariant that does not hold."""
    raise PlanError(
        f"the plan is not valid. {invariant}: {where}: expected {expected}, got {got}. Check that "
        "these are the planned trajectories in the planned order, or plan them again."
    )


def describe(number: int, microbatch: Microbatch) -> str:
    """How errors name a microbatch."""
    return f"microbatch {number} (slot {microbatch.slot}, replica {microbatch.replica})"


def check_coverage(members: dict[int, list[int]], trajectories: int) -> None:
    """Check that the members of microbatches, by number, are all trajectories, each once.

    Raises:
        PlanError: names the first row that is out of range, missing or held twice.
    """
    holders: list[list[int]] = [[] for _ in range(trajectories)]
    for number, rows in members.items():
        if not rows:
            refuse("coverage", f"microbatch {number}", "at least one trajectory", "none")
        for row in rows:
            if not 0 <= row < trajectories:
                refuse("coverage", f"microbatch {number}", f"rows 0 to {trajectories - 1}", row)
            holders[row].append(number)
    for row, found in enumerate(holders):
        if len(found) != 1:
            got = f"it in microbatches {found}" if found else "it in none"
            refuse("coverage", f"trajectory {row}", "it in exactly one microbatch", got)


def _check_fillers(plan: StepPlan, trajectories: int) -> None:
    """Fillers are too few to take a whole slot, and each repeats one trajectory."""
    fillers = [(k, m) for k, m in enumerate(plan.microbatches) if m.filler]
    if len(fillers) >= plan.replicas:
        refuse("fillers", "the plan", f"fewer than {plan.replicas} replicas", len(fillers))
    for k, microbatch in fillers:
        check_filler(describe(k, microbatch), microbatch.members.tolist(), trajectories)


def check_filler(where: str, rows: list[int], trajectories: int) -> None:
    """Check that a filler's members are one trajectory.

    Raises:
        PlanError: they are none, several, or a row that does not exist.
    """
    if len(rows) != 1 or not 0 <= rows[0] < trajectories:
        refuse("fillers", where, f"one row of 0 to {trajectories - 1} to repeat", rows)


def _check_grid(plan: StepPlan) -> None:
    """Microbatches are listed by slot, then replica, and every replica has one in every slot."""
    if len(plan.microbatches) % plan.replicas:
        expected = f"a number of microbatches that {plan.replicas} replicas divide"
        refuse("grid", "the plan", expected, len(plan.microbatches))
    for k, microbatch in enumerate(plan.microbatches):
        expected_place, place = divmod(k, plan.replicas), (microbatch.slot, microbatch.replica)
        if place != expected_place:
            refuse("grid", f"microbatch {k}", f"(slot, replica) {expected_place}", place)


def _check_totals(plan: StepPlan, batch: TrajectoryBatch, *, share: bool) -> None:
    """Token totals, J of Eq. 4 term by term, and the bound."""
    if plan.raw_tokens != batch.raw_tokens:
        refuse("raw tokens", "the batch", f"{batch.raw_tokens:,}", f"{plan.raw_tokens:,}")
    if share:
        order, lcp = sorted_prefixes(batch)
        _check_neighbours("the batch", order, lcp, batch)
        merged = batch.raw_tokens - int(lcp.sum())
        if plan.merged_tokens != merged:
            refuse("merged tokens", "the batch", f"{merged:,}", f"{plan.merged_tokens:,}")
    works = np.array([m.compact_tokens for m in plan.microbatches], np.int64)
    grid = works.reshape(-1, plan.replicas)
    objective = (int(works.sum()), int(grid.max(axis=1).sum()), int(grid.sum(axis=0).max()))
    if tuple(plan.objective) != objective:
        refuse("objective", "J of Eq. 4", objective, tuple(plan.objective))
    real = sum(m.compact_tokens for m in plan.microbatches if not m.filler)
    if not 1 <= plan.lower_bound <= real:
        refuse(
            "lower bound",
            "the plan",
            f"1 to {real:,}, the work of the trajectories",
            f"{plan.lower_bound:,}",
        )


def _check_forest(where: str, forest: PrefixForest, batch: TrajectoryBatch, *, share: bool) -> None:
    """Members and what they share, proved on the tokens; segments derived from that once more."""
    lengths = batch.lengths[forest.members]
    if not np.array_equal(forest.lengths, lengths):
        refuse("members", where, f"lengths {lengths.tolist()}", forest.lengths.tolist())
    if share:
        _check_neighbours(where, forest.members, forest.lcp, batch)
    elif forest.lcp.any():
        refuse(
            "shared prefixes",
            where,
            "none, as merged tokens equal raw tokens",
            f"up to {forest.lcp.max()} tokens",
        )
    leaves = check_segments(
        where,
        (forest.lengths, forest.lcp),
        (
            forest.segment_parent.tolist(),
            forest.segment_start.tolist(),
            forest.segment_end.tolist(),
        ),
    )
    _check_segment_members(where, forest, leaves)


def _check_neighbours(where: str, members: Int, lcp: Int, batch: TrajectoryBatch) -> None:
    """Prove from the tokens that members are in lexicographic order and have these LCPs.

    Each pair of neighbours agrees on ``lcp`` tokens, and behind them the left one ends or has the
    smaller token. Of identical trajectories the earlier row comes first.
    """
    if lcp.shape != members.shape or lcp[0] != 0:
        refuse("shared prefixes", where, "one count a member, the first 0", lcp.tolist())
    columns: list[NDArray[np.generic]] = [batch.tokens]
    columns += [] if batch.identity is None else [batch.identity]
    offsets = batch.offsets.tolist()
    for (a, b), shared in zip(pairwise(members.tolist()), lcp[1:].tolist(), strict=True):
        left, right = offsets[a], offsets[b]
        left_rest, right_rest = offsets[a + 1] - left - shared, offsets[b + 1] - right - shared
        pair = f"{where}, trajectories {a} and {b}"
        if min(shared, left_rest, right_rest) < 0 or not all(
            np.array_equal(c[left : left + shared], c[right : right + shared]) for c in columns
        ):
            refuse("shared prefixes", pair, f"{shared} tokens in common", "fewer")
        smaller, larger = (left_rest, a), (right_rest, b)
        if left_rest and right_rest:
            smaller, larger = _key(batch, left + shared), _key(batch, right + shared)
            if smaller == larger:
                refuse("shared prefixes", pair, f"{shared} tokens in common", "more")
        if smaller > larger:
            refuse("sorting", pair, "lexicographic order", "the reverse")


def _key(batch: TrajectoryBatch, index: int) -> tuple[int, int]:
    """What order and sharing see of flat token ``index``; identity counts as unsigned."""
    identity = 0 if batch.identity is None else int(batch.identity[index]) % (1 << 64)
    return int(batch.tokens[index]), identity


def check_segments(
    where: str,
    trajectories: tuple[Int, Int],
    segments: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> list[tuple[int, int]]:
    """Check segments (parent, start, end), each [V], against sorted (lengths, lcp), each [n].

    Returns the first and the last leaf below each segment.

    Raises:
        PlanError: names the first segment that differs.
    """
    lengths, lcp = (column.tolist() for column in trajectories)
    derived = _derived_segments(lengths, lcp)
    expected = [spans for spans, _ in derived]
    found = list(zip(*segments, strict=True))
    if len(found) != len(expected):
        refuse("segments", where, f"{len(expected)} segments", len(found))
    for v, (right, got) in enumerate(zip(expected, found, strict=True)):
        if right != got:
            refuse("segments", f"{where}, segment {v}", f"(parent, start, end) {right}", got)
    return [leaves for _, leaves in derived]


def _derived_segments(
    lengths: Sequence[int], lcp: Sequence[int]
) -> list[tuple[tuple[int, int, int], tuple[int, int]]]:
    """((parent, start, end), (first leaf, last leaf)) of every segment, depth first.

    Segments are the LCP intervals of the leaves, enumerated bottom up (Abouelhoda, Kurtz and
    Ohlebusch, 2004). O(V log V) time, no recursion.
    """
    depth, above, first, last = [0], [-1], [0], [0]
    path = [0]

    def open_node(position: int, leaf: int) -> None:
        path.append(len(depth))
        for column, value in ((depth, position), (above, -1), (first, leaf), (last, leaf)):
            column.append(value)

    for leaf, (length, shared) in enumerate(zip(lengths, [*lcp[1:], 0], strict=True)):
        if shared == length:
            continue  # a prefix of its successor neither forks nor ends a segment
        open_node(length, leaf)
        while depth[path[-1]] > shared:
            lower = path.pop()
            last[lower] = leaf
            if depth[path[-1]] < shared:
                open_node(shared, first[lower])
            above[lower] = path[-1]
    order = sorted(range(1, len(depth)), key=lambda node: (first[node], depth[node]))
    number = {0: -1} | {node: v for v, node in enumerate(order)}
    return [((number[above[n]], depth[above[n]], depth[n]), (first[n], last[n])) for n in order]


def _check_segment_members(where: str, forest: PrefixForest, leaves: list[tuple[int, int]]) -> None:
    """The trajectory that stands for a segment lies below it and reaches its end."""
    lengths = forest.lengths.tolist()
    ends = forest.segment_end.tolist()
    for v, member in enumerate(forest.segment_member.tolist()):
        low, high = leaves[v]
        if not (low <= member <= high and lengths[member] >= ends[v]):
            expected = f"a member of {low} to {high} that reaches position {ends[v]}"
            refuse("segments", f"{where}, segment {v}", expected, f"member {member}")


def _check_calls(where: str, forest: PrefixForest, calls: CallPlan, chunk_size: int) -> None:
    """Chains, replays and states of every round; states come from rounds before."""
    if calls.chunk_size != chunk_size:
        refuse("settings", where, f"chunk_size {chunk_size}", calls.chunk_size)
    segments = _Segments(forest, chunk_size)
    made: dict[State, bool] = {}  # whether a later sequence started from it
    seen = [0] * len(segments.end)
    for r, packed in enumerate(calls.rounds):
        if not packed:
            refuse("chains", f"{where}, round {r}", "at least one sequence", "none")
        requested: list[State] = []
        for q, sequence in enumerate(packed):
            place = f"{where}, round {r}, sequence {q}"
            segments.check_chain(place, sequence.chain)
            for v in sequence.chain:
                seen[v] += 1
            segments.check_start(place, sequence, made)
            requested += segments.requests(place, sequence)
        made |= dict.fromkeys(requested, False)
    for v, times in enumerate(seen):
        if times != 1:
            refuse("every segment once", f"{where}, segment {v}", "to run once", f"{times} times")
    unused = [state for state, used in made.items() if not used]
    if unused:
        state = "(segment {}, position {})".format(*unused[0])
        refuse("requests", where, f"a later sequence that starts from {state}", "none")


class _Segments:
    """One microbatch's segments as lists, with the boundary state that is right behind each."""

    def __init__(self, forest: PrefixForest, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.parent: list[int] = forest.segment_parent.tolist()
        self.start: list[int] = forest.segment_start.tolist()
        self.end: list[int] = forest.segment_end.tolist()
        self.latest: list[State | None] = []
        """Of each segment: the last boundary state on the path that ends with it; None is zero."""
        for v, above in enumerate(self.parent):
            boundary = self.anchor(self.end[v])
            inherited = None if above < 0 else self.latest[above]
            self.latest.append((v, boundary) if boundary > self.start[v] else inherited)

    def anchor(self, position: int) -> int:
        """a(p) of Eq. 2."""
        return position // self.chunk_size * self.chunk_size

    def check_chain(self, place: str, chain: Sequence[int]) -> None:
        """A chain is segments of the tree, each a child of the one before."""
        if not chain:
            refuse("chains", place, "at least one segment", "none")
        for v in chain:
            if not 0 <= v < len(self.end):
                refuse("chains", place, f"segments 0 to {len(self.end) - 1}", v)
        for upper, lower in pairwise(chain):
            if self.parent[lower] != upper:
                refuse("chains", place, f"a child of segment {upper} behind it", lower)

    def check_start(self, place: str, sequence: PackedSequence, made: dict[State, bool]) -> None:
        """Replay is exactly [a(p), p), from the path's own state at a(p), made before; Eq. 2."""
        head = sequence.chain[0]
        fork = self.start[head]
        replay = (self.anchor(fork), fork)
        if sequence.replay != replay:
            refuse("replay", place, f"positions [a(p), p) = {replay}", sequence.replay)
        above = self.parent[head]
        expected = self.latest[above] if above >= 0 else None
        state = sequence.initial_state
        got = None if state is None else (state.segment, state.position)
        if got != expected:
            refuse("initial state", place, f"(segment, position) {expected}, None is zero", got)
        if expected is None:
            return
        if expected not in made:
            refuse(
                "initial state", place, f"{expected} requested in an earlier round", "no request"
            )
        made[expected] = True

    def requests(self, place: str, sequence: PackedSequence) -> list[State]:
        """The states that a sequence is asked for, after checking their positions."""
        first, last = self.start[sequence.chain[0]], self.end[sequence.chain[-1]]
        states: list[State] = []
        below, holder = first, 0
        for position in sequence.boundaries:
            if position % self.chunk_size or not below < position <= last:
                expected = f"ascending multiples of {self.chunk_size} in ({first}, {last}]"
                refuse("requests", place, expected, list(sequence.boundaries))
            while self.end[sequence.chain[holder]] < position:
                holder += 1
            states.append((sequence.chain[holder], position))
            below = position
        return states
