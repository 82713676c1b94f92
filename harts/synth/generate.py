"""Growing a forest of a workload's shape, scaling it to its token counts, and drawing tokens.

Shapes: S semantic positions, C compact tokens, N trajectories, U nodes of the sampled forest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError
from harts.synth.shapes import PRESETS, Span, WorkloadShape
from harts.trajectories import TrajectoryBatch

_SYSTEM, _SUBAGENT_SYSTEM = 0, 1  # the nodes of the two system prompts in every forest
_GROWTHS: Final = 8


def synthesize(preset: str | WorkloadShape, seed: int) -> TrajectoryBatch:
    """A workload of the named (or given) shape; the same seed gives the same tokens everywhere.

    Only integer draws, uniform floats and IEEE arithmetic are used, never a platform's `log`.

    Raises:
        InputError: no such preset, a seed below 0, or targets that the shape's lengths cannot meet.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise InputError(
            f"synthesize: expected a preset among {', '.join(PRESETS)}, got {preset!r}. Name one."
        )
    if seed < 0:
        raise InputError(f"synthesize: expected a seed of at least 0, got {seed}. Give another.")
    shape = PRESETS[preset] if isinstance(preset, str) else preset
    for _ in range(_GROWTHS):
        rng = np.random.Generator(np.random.PCG64(seed))
        forest = _grow(shape, rng)
        paths = [forest.path(trajectory.leaf) for trajectory in forest.trajectories]
        lengths = _calibrated(forest, paths, shape)
        longest = max(int(lengths[path].sum()) for path in paths)
        if longest <= shape.max_length:
            return _as_batch(forest, paths, lengths, shape, rng)
        shape = replace(shape, context_limit=shape.context_limit * 9 // 10)
    raise InputError(
        f"synthesize: expected trajectories of at most {shape.max_length} tokens, got {longest} "
        f"even when compacted from {shape.context_limit} on. Shorten turns or retry_turns."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trajectory:
    task: int
    leaf: int
    attempt: int  # trajectories of one attempt are rewarded together


@dataclass(slots=True)
class _Forest:
    """Nodes [U] of the sampled forest, parents before children, and its trajectories [N]."""

    parent: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    policy: list[bool] = field(default_factory=list)
    fixed: list[bool] = field(default_factory=list)  # system prompts keep their length
    depth: list[int] = field(default_factory=list)  # tokens down to the node's end
    ordinal: list[int] = field(default_factory=list)  # place among its siblings
    children: dict[int, int] = field(default_factory=dict)
    trajectories: list[_Trajectory] = field(default_factory=list)
    attempts: int = 0

    def add(self, parent: int, length: int, *, policy: bool = False, fixed: bool = False) -> int:
        self.parent.append(parent)
        self.length.append(length)
        self.policy.append(policy)
        self.fixed.append(fixed)
        self.depth.append(length + (self.depth[parent] if parent >= 0 else 0))
        self.ordinal.append(self.children.get(parent, 0))
        self.children[parent] = self.ordinal[-1] + 1
        return len(self.parent) - 1

    def path(self, leaf: int) -> list[int]:
        nodes = []
        while leaf >= 0:
            nodes.append(leaf)
            leaf = self.parent[leaf]
        return nodes[::-1]


@dataclass(slots=True, kw_only=True)
class _Task:
    number: int
    budget: int  # trajectories still to make
    forks: list[list[tuple[int, int]]] = field(default_factory=list)
    """Of each try: the node that a turn starts at, and the attempt it belongs to."""


def _draw(rng: np.random.Generator, span: Span) -> int:
    low, high = span
    u = float(rng.random())
    return low + int((high - low + 1) * (u * u))


def _grow(shape: WorkloadShape, rng: np.random.Generator) -> _Forest:
    forest = _Forest()
    forest.add(-1, shape.system_prompt, fixed=True)
    forest.add(-1, shape.subagent_system_prompt, fixed=True)
    bounds = [shape.trajectories * task // shape.tasks for task in range(shape.tasks + 1)]
    for task, (start, end) in enumerate(pairwise(bounds)):
        _grow_task(forest, task, end - start, shape, rng)
    return forest


def _grow_task(
    forest: _Forest, number: int, budget: int, shape: WorkloadShape, rng: np.random.Generator
) -> None:
    task = _Task(number=number, budget=budget)
    context = forest.add(_SYSTEM, _draw(rng, shape.context))
    for _ in range(shape.tries):
        if task.budget:
            task.forks.append([])
            _grow_attempt(forest, task, task.forks[-1], context, shape.turns, shape, rng)
    while task.budget:
        forks = task.forks[int(rng.integers(len(task.forks)))]
        drawn = rng.integers(len(forks), size=shape.retry_draws)
        node, attempt = max((forks[i] for i in drawn), key=lambda f: forest.depth[f[0]])
        if float(rng.random()) < shape.subagent_share:
            prompt = forest.add(_SUBAGENT_SYSTEM, _draw(rng, shape.context))
            leaf = _grow_turns(forest, prompt, _draw(rng, shape.subagent_turns), shape, rng)
            task.budget -= 1
            forest.trajectories.append(_Trajectory(task=number, leaf=leaf, attempt=attempt))
        else:
            _grow_attempt(forest, task, forks, node, shape.retry_turns, shape, rng)


def _grow_attempt(
    forest: _Forest,
    task: _Task,
    forks: list[tuple[int, int]],
    node: int,
    turns: Span,
    shape: WorkloadShape,
    rng: np.random.Generator,
) -> None:
    """One try or retry from `node`: a trajectory, and one more for each compaction."""
    attempt = forest.attempts
    forest.attempts += 1
    for _ in range(_draw(rng, turns)):
        if forest.depth[node] > shape.context_limit:
            if task.budget == 1:
                break
            task.budget -= 1
            forest.trajectories.append(_Trajectory(task=task.number, leaf=node, attempt=attempt))
            node = forest.add(_SYSTEM, _draw(rng, shape.summary))
        forks.append((node, attempt))
        node = _grow_turns(forest, node, 1, shape, rng)
    task.budget -= 1
    forest.trajectories.append(_Trajectory(task=task.number, leaf=node, attempt=attempt))


def _grow_turns(
    forest: _Forest, node: int, turns: int, shape: WorkloadShape, rng: np.random.Generator
) -> int:
    for _ in range(turns):
        node = forest.add(node, _draw(rng, shape.policy_turn), policy=True)
        node = forest.add(node, _draw(rng, shape.observation))
    return node


def _calibrated(forest: _Forest, paths: list[list[int]], shape: WorkloadShape) -> NDArray[np.int64]:
    """Node lengths [U] scaled to the shape's raw and compact tokens.

    S = sum of uses x length and C = sum of length are linear in the factors of shared and private
    nodes, so two equations give both.
    """
    drawn = np.array(forest.length, np.int64)
    uses = np.bincount(np.concatenate(paths), minlength=drawn.size)
    fixed = np.array(forest.fixed)
    shared, private = ~fixed & (uses > 1), ~fixed & (uses == 1)
    shared_raw, shared_compact = int((uses * drawn)[shared].sum()), int(drawn[shared].sum())
    private_sum = int(drawn[private].sum())
    raw = shape.raw_tokens - int((uses * drawn)[fixed].sum())
    compact = shape.compact_tokens - int(drawn[fixed & (uses > 0)].sum())
    # shared_raw x + private_sum y = raw and shared_compact x + private_sum y = compact
    x = (raw - compact) / max(1, shared_raw - shared_compact)
    y = (compact - shared_compact * x) / max(1, private_sum)
    if x <= 0 or y <= 0:
        raise InputError(
            f"synthesize: expected lengths that can give S={shape.raw_tokens} and "
            f"C={shape.compact_tokens}, got factors {x:.3f} (shared) and {y:.3f} (private). "
            "Change the turns, retries or targets of the shape."
        )
    factor = np.where(fixed, 1.0, np.where(uses > 1, x, y))
    lengths = np.maximum(1, np.rint(drawn * factor)).astype(np.int64)
    if shape.exact:
        _spread(lengths, np.flatnonzero(private), shape.raw_tokens - int((uses * lengths).sum()))
    return lengths


def _spread(lengths: NDArray[np.int64], nodes: NDArray[np.int64], missing: int) -> None:
    """Add `missing` tokens, which may be negative, to `nodes`, the same to each but for one."""
    longest_first = nodes[np.argsort(-lengths[nodes], kind="stable")]
    each, rest = divmod(abs(missing), max(1, nodes.size))
    added = np.full(nodes.size, each)
    added[:rest] += 1
    lengths[longest_first] += np.sign(missing) * added


def _as_batch(
    forest: _Forest,
    paths: list[list[int]],
    lengths: NDArray[np.int64],
    shape: WorkloadShape,
    rng: np.random.Generator,
) -> TrajectoryBatch:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    u = rng.random(int(ends[-1]))
    tokens = (shape.vocabulary * (u * u)).astype(np.int32)  # frequent and rare ids, as in text
    # Siblings begin with different tokens, so that the trie forks where the forest does.
    base = rng.integers(shape.vocabulary, size=lengths.size + 1)[np.array(forest.parent)]
    tokens[starts] = (base + np.array(forest.ordinal)) % shape.vocabulary
    mask = np.repeat(np.array(forest.policy), lengths)
    spans = [[(int(starts[node]), int(ends[node])) for node in path] for path in paths]
    path_lengths = np.array([sum(end - start for start, end in path) for path in spans])
    return TrajectoryBatch.from_flat(
        np.concatenate([tokens[start:end] for path in spans for start, end in path]),
        np.concatenate([[0], np.cumsum(path_lengths)]),
        loss_mask=np.concatenate([mask[start:end] for path in spans for start, end in path]),
        rewards=_rewards(forest, rng),
        tree_ids=[f"task-{trajectory.task}" for trajectory in forest.trajectories],
        trajectory_ids=[
            f"task-{trajectory.task}/{number}"
            for number, trajectory in enumerate(forest.trajectories)
        ],
    )


def _rewards(forest: _Forest, rng: np.random.Generator) -> NDArray[np.float64]:
    """[N] success of each attempt, 0 or 1; every task has both, so that advantages are not 0."""
    attempts = np.array([trajectory.attempt for trajectory in forest.trajectories])
    tasks = np.array([trajectory.task for trajectory in forest.trajectories])
    rates = 0.2 + 0.6 * rng.random(int(tasks.max()) + 1)
    task_of = np.zeros(forest.attempts, np.int64)
    task_of[attempts] = tasks
    success = (rng.random(forest.attempts) < rates[task_of]).astype(np.float64)
    for task in range(rates.size):
        own = np.flatnonzero(task_of == task)
        if own.size > 1 and success[own].min() == success[own].max():
            success[own[0]] = 1 - success[own[0]]
    rewards: NDArray[np.float64] = success[attempts]
    return rewards
