"""Seeded synthetic workloads shaped like a coding agent on repository tasks (paper, section 5.1).

A task starts from a system prompt with tool descriptions that all tasks share, then its own
context. Several tries of the task grow turn by turn (what the policy writes, then what the
environment answers). Retries leave a try at any of its turns; sub-agents start from a system
prompt of their own; a try that outgrows its context limit is compacted: it ends, and goes on
behind the system prompt and a summary. Every one of these is a trajectory, and those of a task
are one rollout tree.

Shapes: S semantic positions, C compact tokens, N trajectories, U nodes of the sampled forest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError
from harts.trajectories import TrajectoryBatch

__all__ = ["PRESETS", "WorkloadShape", "synthesize"]

_SYSTEM, _SUBAGENT_SYSTEM = 0, 1  # the nodes of the two system prompts in every forest
_GROWTHS: Final = 8

Span: TypeAlias = tuple[int, int]
"""Inclusive bounds of a drawn count; the draw is skewed, with many short and few long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """What a synthetic workload looks like. Lengths are in tokens.

    `trajectories` is met exactly. Lengths are drawn from the spans and then scaled by two factors,
    one for what several trajectories share and one for what only one has, so that `raw_tokens` (S)
    and `compact_tokens` (C) are met with any seed up to rounding; the system prompts stay as they
    are. No trajectory is longer than `max_length`. A retry leaves at the deepest of `retry_draws`
    drawn turns. Where all of this cannot be had, attempts are compacted at a lower limit.
    """

    vocabulary: int
    tasks: int
    tries: int
    trajectories: int
    raw_tokens: int
    compact_tokens: int
    system_prompt: int
    context: Span
    turns: Span
    policy_turn: Span
    observation: Span
    retry_turns: Span
    retry_draws: int
    subagent_share: float
    subagent_system_prompt: int
    subagent_turns: Span
    context_limit: int
    summary: Span
    max_length: int

    def __post_init__(self) -> None:
        if self.trajectories < self.tasks * self.tries:
            raise InputError(
                f"WorkloadShape: expected at least tasks x tries = {self.tasks * self.tries} "
                f"trajectories, got {self.trajectories}. Ask for more or lower tasks or tries."
            )
        if not 0 < self.compact_tokens <= self.raw_tokens:
            raise InputError(
                "WorkloadShape: expected 0 < compact_tokens <= raw_tokens, got "
                f"{self.compact_tokens} and {self.raw_tokens}. Correct the two targets."
            )


_CODING_AGENT: Final = WorkloadShape(
    vocabulary=157_184,
    tasks=21,
    tries=8,
    trajectories=1_551,
    raw_tokens=42_329_859,
    compact_tokens=7_547_168,
    system_prompt=1_024,
    context=(128, 768),
    turns=(18, 30),
    policy_turn=(48, 900),
    observation=(64, 3_200),
    retry_turns=(1, 2),
    retry_draws=6,
    subagent_share=0.06,
    subagent_system_prompt=512,
    subagent_turns=(4, 20),
    context_limit=60_000,
    summary=(600, 2_400),
    max_length=65_535,
)

# Paths, raw tokens and HARTS compact tokens of the paper's Table 2. The last are after the steps
# were cut to microbatches, which repeats the prefixes at the cuts: the trie of the whole step is
# taken to be 3% smaller.
_TABLE_2: Final = (
    (1_551, 42_329_859, 7_780_586),
    (1_693, 44_799_214, 7_670_675),
    (2_368, 58_835_220, 7_747_595),
    (1_283, 34_603_796, 5_659_215),
    (1_613, 43_931_290, 8_266_355),
    (1_752, 48_612_718, 9_671_964),
    (1_457, 38_966_280, 7_015_681),
    (1_411, 38_541_212, 7_504_249),
    (1_738, 48_352_605, 9_188_374),
    (1_304, 36_062_624, 7_077_264),
)

_TINY: Final = WorkloadShape(
    vocabulary=512,
    tasks=8,
    tries=2,
    trajectories=80,
    raw_tokens=20_000,
    compact_tokens=4_700,
    system_prompt=64,
    context=(24, 64),
    turns=(8, 22),
    policy_turn=(4, 16),
    observation=(3, 20),
    retry_turns=(1, 1),
    retry_draws=3,
    subagent_share=0.05,
    subagent_system_prompt=32,
    subagent_turns=(2, 4),
    context_limit=420,
    summary=(16, 48),
    max_length=600,
)

_SMALL: Final = replace(
    _CODING_AGENT,
    vocabulary=32_768,
    tasks=8,
    tries=2,
    trajectories=128,
    raw_tokens=1_000_000,
    compact_tokens=200_000,
    system_prompt=512,
    context=(128, 512),
    turns=(16, 36),
    policy_turn=(24, 260),
    observation=(32, 800),
    retry_turns=(1, 3),
    retry_draws=3,
    subagent_system_prompt=256,
    subagent_turns=(3, 10),
    context_limit=14_000,
    summary=(200, 800),
    max_length=20_000,
)

PRESETS: Final[Mapping[str, WorkloadShape]] = MappingProxyType(
    {
        "tiny": _TINY,
        "small": _SMALL,
        **{
            f"table2-{step}": replace(
                _CODING_AGENT,
                tasks=compact // 360_000,
                trajectories=paths,
                raw_tokens=raw,
                compact_tokens=compact * 97 // 100,
            )
            for step, (paths, raw, compact) in enumerate(_TABLE_2, 1)
        },
    }
)
"""`tiny` trains on two cores, `small` plans at once, `table2-N` has the size of Table 2 step N."""


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
    return np.maximum(1, np.rint(drawn * factor)).astype(np.int64)


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
