"""Small models, a step on a hard tree, and what the Hugging Face engine makes of it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BailingHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridTopkRouter

from harts.fidelity import float64_everywhere, gradients
from harts.models import prepare
from harts.models.random_weights import drawn
from harts.objectives import GRPO, StepTargets, prepare_step
from harts.planning.step import StepPlan, plan_step
from harts.training.step import BalancingForm, RouterLosses, StepOutcome, run_step
from harts.trajectories import TrajectoryBatch
from tests.forests import hard_tree

VOCABULARY = 51
"""Odd, so that two ranks of tensor parallelism hold one row of padding."""
STEPS = 2
LEARNING_RATE = 1e-2
EPSILON = 1e-2
"""Of Adam: as large as typical gradients, so that an update is a smooth function of them."""
CLIP = 0.5
BIAS_RATE = 2.0**-7
ROUTER = RouterLosses(z_coefficient=1e-2, load_balancing_coefficient=1e-1)
OBJECTIVE = GRPO(clip_low=1.0, clip_high=1e6)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step of one batch by one model, as planned for some replicas."""

    family: str = "bailing_hybrid"
    replicas: int = 1
    capacity: int = 500
    trajectories: int | None = None
    """Of the hard tree, all by default; fewer than replicas take a filler."""
    balancing: BalancingForm = "microbatch"

    @property
    def router(self) -> RouterLosses:
        return replace(ROUTER, load_balancing=self.balancing)

    def batch(self) -> TrajectoryBatch:
        whole = hard_tree(VOCABULARY)
        return whole if self.trajectories is None else whole.select(np.arange(self.trajectories))

    def plan(self) -> StepPlan:
        return plan_step(self.batch(), replicas=self.replicas, capacity=self.capacity, fillers=True)

    def targets(self) -> StepTargets:
        return prepare_step(self.batch(), OBJECTIVE)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """One step of the Hugging Face engine."""

    outcome: StepOutcome
    gradients: dict[str, torch.Tensor]
    norm: float
    state: dict[str, torch.Tensor]
    """After the optimiser's step and that of the expert bias."""


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "experts_implementation": "eager",
}
_SOFTMAX: dict[str, Any] = {"mlp_only_layers": [0], "num_experts_per_tok": 2, **_EXPERTS}


def small_config(family: str = "bailing_hybrid") -> Any:
    """The first layer dense, the others MoE; heads that four ranks of TP and CP cut."""
    match family:
        case "bailing_hybrid":  # KDA, KDA, KDA, MLA
            return BailingHybridConfig(
                num_hidden_layers=4,
                num_key_value_heads=4,
                head_dim=8,
                layer_group_size=4,
                first_k_dense_replace=1,
                num_experts_per_token=4,
                num_expert_group=4,
                topk_group=2,
                kv_lora_rank=16,
                qk_nope_head_dim=6,
                qk_rope_head_dim=8,
                v_head_dim=10,
                **_COMMON,
                **_EXPERTS,
            )
        case "qwen3_next":  # two key/value heads: four ranks must share them
            kinds = [*["linear_attention"] * 2, "full_attention", "linear_attention"]
            return Qwen3NextConfig(**_hybrid(kinds), **_GROUPED, **_SOFTMAX)
        case "qwen3_5_moe_text":
            kinds = ["linear_attention", "full_attention"]
            return Qwen3_5MoeTextConfig(**_hybrid(kinds), **_GROUPED, **_SOFTMAX)
        case "qwen3_5_text":
            kinds = ["full_attention", "linear_attention"]
            return Qwen3_5TextConfig(**_hybrid(kinds), **_GROUPED)
        case "qwen3_moe":
            return Qwen3MoeConfig(num_hidden_layers=2, **_COMMON, **_GROUPED, **_SOFTMAX)
    return Qwen3Config(num_hidden_layers=2, **_COMMON, **_GROUPED)


def _hybrid(layer_types: list[str]) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "shared_expert_intermediate_size": 16,
        **_COMMON,
    }


def small_model(family: str = "bailing_hybrid") -> Any:
    """A model in float64, whose slow heads keep a wrong state for good."""
    torch.manual_seed(0)
    with float64_everywhere():
        model = drawn(AutoModelForCausalLM.from_config(small_config(family)))
    for module in model.modules():
        if isinstance(module, BailingHybridTopkRouter):
            # Multiples of a power of two, as the rate is: exact in float32, which Megatron keeps.
            bias = module.e_score_correction_bias
            bias.copy_((bias / BIAS_RATE).round() * BIAS_RATE)
    return model.double().train()


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class Truths:
    """What a case starts from and must arrive at."""

    initial: dict[str, torch.Tensor]
    steps: list[Truth]


def true_steps(work: Work) -> Truths:
    """Steps of the Hugging Face engine in float64, all replicas in this process."""
    policy = prepare(small_model(work.family))
    initial = whole_state(policy.model)
    optimizer: Any = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0
    )
    batch, plan, targets = work.batch(), work.plan(), work.targets()
    found = []
    for _ in range(STEPS):
        policy.zero_grad()
        with float64_everywhere():
            outcome = run_step(policy, batch, plan, targets, OBJECTIVE, work.router)
        before_clipping = gradients(policy.model)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        policy.update_expert_bias(outcome.expert_counts, BIAS_RATE)
        found.append(
            Truth(
                outcome=outcome,
                gradients=before_clipping,
                norm=float(norm),
                state=whole_state(policy.model),
            )
        )
    return Truths(initial=initial, steps=found)
