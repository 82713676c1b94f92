"""Every family: exact against each trajectory alone, and otherwise still the library's model."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from harts.errors import InputError, UnsupportedError
from harts.fidelity import (
    compare_gradients,
    compare_outcomes,
    float64_everywhere,
    gradients,
    run_alone,
)
from harts.models import Recomputation, prepare
from harts.models.families import MODEL_TYPES, family_named
from harts.models.group_router import GroupRouter
from harts.models.linear_attention import TreeLayer
from harts.objectives import GRPO, PPO, PolicyObjective, prepare_step
from harts.planning.step import plan_step
from harts.training.step import RouterLosses, run_step
from tests.forests import hard_tree, lay_out

VOCABULARY = 50
BOUND = 1e-9
ROUTER = RouterLosses(z_coefficient=1e-2, load_balancing_coefficient=1e-1)
EVERY_FAMILY = pytest.mark.parametrize("model_type", MODEL_TYPES)
OBJECTIVES: dict[str, tuple[PolicyObjective, int]] = {
    "GRPO in one microbatch": (GRPO(), 1 << 20),
    "PPO in several": (PPO(kl_coefficient=0.1, reduction="sequence-mean"), 900),
}


def small(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return family_named(model_type).small_model(VOCABULARY)


@EVERY_FAMILY
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_equals_each_trajectory_alone(model_type: str, name: str) -> None:
    objective, capacity = OBJECTIVES[name]
    family, batch = family_named(model_type), hard_tree(VOCABULARY)
    plan, targets = plan_step(batch, replicas=1, capacity=capacity), prepare_step(batch, objective)
    step = (batch, plan, targets, objective, ROUTER)
    with float64_everywhere():
        model = small(model_type).double().train()
        policy = prepare(copy.deepcopy(model))
        truth = run_alone(model, family, *step)
        for recompute in get_args(Recomputation):
            policy.zero_grad()
            policy.set_recomputation(recompute, scope=float64_everywhere)
            outcome = run_step(policy, *step)
            found = gradients(policy.model)
            rows = [
                *compare_outcomes(outcome, truth, label=model_type, bound=BOUND),
                compare_gradients(found, gradients(model), label=model_type, bound=BOUND),
            ]
            failed = [f"{row.name}: {row.error:.1e}" for row in rows if not row.passed]
            assert failed == [], f"recompute {recompute}"
    assert all(bool(g.any()) for name, g in found.items()), "a parameter that no gradient checks"
    assert len(outcome.expert_counts) == len(family.routers(model))


@EVERY_FAMILY
def test_without_a_tree_the_model_is_the_library_s(model_type: str) -> None:
    model = small(model_type).eval()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    prepared = prepare(model).model
    assert list(prepared.state_dict()) == list(plain.state_dict())
    assert type(prepared) is type(plain)
    tokens = torch.randint(0, VOCABULARY, (2, 20))
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    made = [
        m.generate(
            tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None
        )
        for m in (plain, prepared)
    ]
    assert torch.equal(*made)


@EVERY_FAMILY
def test_every_kind_of_linear_layer_has_a_tree_form_and_slow_heads(model_type: str) -> None:
    model = small(model_type)
    kinds = list(getattr(model.config, "layer_types", None) or [])
    prepared = prepare(model).model
    trees = [m for m in prepared.modules() if isinstance(m, TreeLayer)]
    assert len(trees) == kinds.count("linear_attention")


@EVERY_FAMILY
def test_routers_with_groups_have_a_compiled_form(model_type: str) -> None:
    family = family_named(model_type)
    routers = family.routers(prepare(small(model_type)).model)
    with_groups = model_type in ("bailing_hybrid", "deepseek_v3", "kimi_linear")
    assert [isinstance(r, GroupRouter) for r in routers] == [with_groups] * len(routers)


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next"])
def test_compiled_layers_give_the_same_step_and_share_compilations(model_type: str) -> None:
    _, _, layout = lay_out(hard_tree(VOCABULARY), chunk_size=64)
    results = []
    torch.compiler.reset()
    for compiled in (False, True):
        policy = prepare(small(model_type).train())
        policy.set_recomputation("selective")
        if compiled:
            torch._dynamo.utils.counters.clear()
            # Traces as inductor does, and runs without compiling C++.
            policy.compile_layers(backend="aot_eager")
        output = policy(layout)
        output.logprobs.sum().backward()
        results.append((output.logprobs.detach(), gradients(policy.model)))
    (plain, plain_gradients), (fused, fused_gradients) = results
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    row = compare_gradients(fused_gradients, plain_gradients, label="compiled", bound=1e-3)
    assert row.passed, f"{row.name}: {row.error:.1e}"
    found = torch._dynamo.utils.counters
    broken = [reason for reason in found["graph_break"] if "disable" not in reason]
    assert not broken, "only the tree's operators are left out"
    assert 3 <= found["stats"]["unique_graphs"] <= 20, "a few a kind of layer, not a layer"


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next", "qwen3_moe"])
def test_copies_of_a_compiled_policy_run_their_own_weights(model_type: str) -> None:
    _, _, layout = lay_out(hard_tree(VOCABULARY), chunk_size=64)
    policy = prepare(small(model_type).train())
    policy.compile_layers(backend="aot_eager")
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1)
        fresh = prepare(small(model_type).train())
        fresh.load_state_dict(other.state_dict())
        logprobs = other(layout).logprobs
        torch.testing.assert_close(logprobs, fresh(layout).logprobs, rtol=1e-4, atol=1e-4)
        logprobs.sum().backward()
        assert all(p.grad is None for p in policy.parameters())
        assert all(p.grad is not None for p in other.parameters())


def test_a_policy_runs_in_a_process_that_only_loads_it(tmp_path: Path) -> None:
    policy = prepare(small("bailing_hybrid"))
    _, _, layout = lay_out(hard_tree(VOCABULARY), chunk_size=64)
    torch.save((policy, layout), tmp_path / "policy.pt")
    code = (
        "import sys, torch\n"
        "policy, layout = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.save(policy(layout).logprobs, sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "policy.pt", tmp_path / "logprobs.pt"]
    subprocess.run(command, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logprobs.pt"), policy(layout).logprobs)


def test_another_attention_implementation_is_refused_before_it_ignores_the_tree() -> None:
    _, _, layout = lay_out(hard_tree(VOCABULARY), chunk_size=64)
    policy = prepare(small("qwen3_moe"))
    policy.model.set_attn_implementation("eager")
    with pytest.raises(InputError, match=r"'harts_tree'.*is 'eager'.*set_attn_implementation"):
        policy(layout)
    policy.model.set_attn_implementation("harts_tree")
    assert policy(layout).logprobs.isfinite().all()


def test_an_unknown_model_is_refused_with_the_supported_ones() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UnsupportedError, match=r"'gpt2'.*bailing_hybrid.*docs/models.md"):
        prepare(model)
    with pytest.raises(UnsupportedError, match=r"no config\.model_type"):
        prepare(torch.nn.Linear(2, 2))


def test_a_window_of_attention_is_refused() -> None:
    for model_type in ("qwen3", "qwen3_moe"):
        config = small(model_type).config
        config.use_sliding_window = True
        config.sliding_window = 8
        with pytest.raises(UnsupportedError, match=r"window is not supported.*sliding_window=8"):
            prepare(type(small(model_type))(config))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_are_refused(rope_type: str) -> None:
    model = small("llama")
    model.config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedError, match=f"'{rope_type}' turns positions by the length"):
        prepare(model)
