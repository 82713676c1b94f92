"""The routed experts of one rank: against one expert after the other, and when no row comes."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "needs megatron-core, which pip install 'harts[megatron]' brings", allow_module_level=True
    )

from harts.megatron.experts import GroupedExperts

WIDTH, EXPERT_WIDTH, EXPERTS = 8, 6, 4


class OneRank:
    """A process group of this process alone."""

    def size(self) -> int:
        return 1


def experts(**changes: Any) -> GroupedExperts:
    config = SimpleNamespace(
        moe_ffn_hidden_size=EXPERT_WIDTH,
        hidden_size=WIDTH,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        perform_initialization=True,
        init_method=torch.nn.init.normal_,
        output_layer_init_method=torch.nn.init.normal_,
        tensor_model_parallel_size=1,
    )
    torch.manual_seed(0)
    groups = SimpleNamespace(ep=OneRank(), expt_tp=OneRank())
    return GroupedExperts(
        EXPERTS, SimpleNamespace(**(vars(config) | changes)), pg_collection=groups
    )


def one_after_the_other(layer: GroupedExperts, rows: Any, counts: list[int], weights: Any) -> Any:
    found = []
    cut = zip(rows.split(counts), weights.split(counts), layer.gate_up, layer.down, strict=True)
    for part, weight, gate_up, down in cut:
        gate, up = (part @ gate_up.T).chunk(2, -1)
        found.append(weight[:, None] * ((F.silu(gate) * up) @ down.T))
    return torch.cat(found)


def test_rows_go_through_their_experts_and_some_have_none() -> None:
    layer, counts = experts(), [3, 0, 5, 1]
    rows = torch.randn(9, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, dtype=torch.float64, requires_grad=True)
    inputs = [rows, weights, layer.gate_up, layer.down]
    got, bias = layer(rows, torch.tensor(counts), weights)
    want = one_after_the_other(layer, rows, counts, weights)
    assert bias is None
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    seed = torch.randn_like(want)
    mine, theirs = (torch.autograd.grad(x, inputs, seed) for x in (got, want))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_without_rows_every_parameter_has_a_gradient_of_zeros() -> None:
    layer = experts()
    rows = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(EXPERTS, dtype=torch.int64)
    output, _ = layer(rows, none, torch.zeros(0, dtype=torch.float64))
    assert output.shape == (0, WIDTH)
    output.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_experts_with_a_grid_of_their_own_are_reduced_over_it() -> None:
    assert all(p.allreduce for p in experts().parameters())
    assert not any(p.allreduce for p in experts(tensor_model_parallel_size=2).parameters())
