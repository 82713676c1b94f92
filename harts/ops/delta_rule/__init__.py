"""KDA and Gated DeltaNet: token by token, in chunks over packed sequences, and over a tree."""

from harts.ops.delta_rule.arguments import DeltaRuleOutput
from harts.ops.delta_rule.chunkwise import chunk_delta_rule
from harts.ops.delta_rule.dispatch import Backend, choose_backend, delta_rule_backend
from harts.ops.delta_rule.reference import recurrent_delta_rule
from harts.ops.delta_rule.tree import tree_delta_rule

__all__ = [
    "Backend",
    "DeltaRuleOutput",
    "choose_backend",
    "chunk_delta_rule",
    "delta_rule_backend",
    "recurrent_delta_rule",
    "tree_delta_rule",
]
