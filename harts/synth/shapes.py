"""Shapes of synthetic workloads, and the presets: which figures are the paper's, which are chosen.

*Given by the paper* (Tables 2 and 3), and met by `table2-1` to `table2-10`: paths (N) and raw
tokens (S) exactly; HARTS compact tokens to about 1%, as the total work of the default planner's
microbatches at D = 4, T = 65,536, seed 0; and how well microbatches are filled: over the ten steps
about as many slots as Table 3 reports, 301 at D = 4 and 599 at D = 2.

*Chosen*, as plausible for Claude Code on SWE-bench, and by nothing but those figures: a system
prompt with tool descriptions of 16,384 tokens that all trajectories but sub-agents' share; a task
for every 160,000 compact tokens, tried eight times; turns, retries, sub-agents and compaction as
in `_CODING_AGENT`. The paper gives no size of the trie of a whole step, no number of tasks and no
distribution of lengths or forks. So tries, forks and leaves below a task are our own, and with
them whatever depends on more than size and fill: the gap to the lower bound, how evenly slots can
be filled, the rounds of calls.

Shapes: S semantic positions, C compact tokens, N trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from harts.errors import InputError

Span: TypeAlias = tuple[int, int]
"""Inclusive bounds of a drawn count; the draw is skewed, with many short and few long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """What a synthetic workload looks like. Lengths are in tokens.

    `trajectories` is met exactly. Lengths are drawn from the spans and then scaled by two factors,
    one for what several trajectories share and one for what only one has, so that `raw_tokens` (S)
    and `compact_tokens` (C) are met with any seed up to rounding; the system prompts stay as they
    are. No trajectory is longer than `max_length`. A retry leaves at the deepest of `retry_draws`
    drawn turns. Where all of this cannot be had, attempts are compacted at a lower limit. With
    `exact` what rounding leaves of S is spread over what only one trajectory has, so that S is met
    to the token and C is off by as much.
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
    exact: bool

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
    tasks=48,
    tries=8,
    trajectories=1_551,
    raw_tokens=42_329_859,
    compact_tokens=5_800_000,
    system_prompt=16_384,
    context=(512, 4_096),
    turns=(6, 40),
    policy_turn=(24, 480),
    observation=(32, 1_600),
    retry_turns=(1, 2),
    retry_draws=6,
    subagent_share=0.06,
    subagent_system_prompt=4_096,
    subagent_turns=(4, 20),
    context_limit=40_000,
    summary=(600, 2_400),
    max_length=65_535,
    exact=True,
)

_TOKENS_PER_TASK: Final = 160_000

# Of each step of the paper's Table 2: paths, raw tokens, HARTS compact tokens. The last are after
# the step was cut to microbatches, which repeats the prefixes at the cuts. The size of the trie of
# the whole step, which the paper does not give, stands behind them: it is such that the default
# planner's microbatches for D = 4 and T = 65,536 hold, together, what the paper's do.
_TABLE_2: Final = (
    (1_551, 42_329_859, 7_780_586, 5_770_000),
    (1_693, 44_799_214, 7_670_675, 5_730_000),
    (2_368, 58_835_220, 7_747_595, 5_880_000),
    (1_283, 34_603_796, 5_659_215, 4_230_000),
    (1_613, 43_931_290, 8_266_355, 6_140_000),
    (1_752, 48_612_718, 9_671_964, 7_170_000),
    (1_457, 38_966_280, 7_015_681, 5_230_000),
    (1_411, 38_541_212, 7_504_249, 5_560_000),
    (1_738, 48_352_605, 9_188_374, 6_770_000),
    (1_304, 36_062_624, 7_077_264, 5_220_000),
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
    exact=False,  # what has been measured on it stays comparable
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
                tasks=compact // _TOKENS_PER_TASK,
                trajectories=paths,
                raw_tokens=raw,
                compact_tokens=merged,
            )
            for step, (paths, raw, compact, merged) in enumerate(_TABLE_2, 1)
        },
    }
)
"""`tiny` trains on two cores, `small` plans at once, `table2-N` has the size of Table 2 step N."""
