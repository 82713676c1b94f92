"""Seeded synthetic workloads shaped like a coding agent on repository tasks (paper, section 5.1).

A task starts from a system prompt with tool descriptions that all tasks share, then its own
context. Several tries of the task grow turn by turn (what the policy writes, then what the
environment answers). Retries leave a try at any of its turns; sub-agents start from a system
prompt of their own; a try that outgrows its context limit is compacted: it ends, and goes on
behind the system prompt and a summary. Every one of these is a trajectory, and those of a task
are one rollout tree.
"""

from harts.synth.generate import synthesize
from harts.synth.shapes import PRESETS, WorkloadShape

__all__ = ["PRESETS", "WorkloadShape", "synthesize"]
