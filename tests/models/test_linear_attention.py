"""Projections side by side: one product of plain matrices, each module's own forward otherwise."""

import pytest
import torch
from torch import nn

from harts.models.linear_attention import side_by_side


def projections(*, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width, bias=bias, dtype=torch.float64) for width in (3, 5, 2)]


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_modules(bias: bool) -> None:
    parts, rows = projections(bias=bias), torch.randn(7, 6, dtype=torch.float64)
    weights = [p.weight for p in parts]
    expected = torch.cat([p(rows) for p in parts], dim=-1)
    found = side_by_side(rows, *parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    wanted = torch.autograd.grad(expected.square().sum(), weights)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), weights), wanted, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Doubled(nn.Linear):
    """As an adapter would be: a matrix whose forward does more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_hooked_or_adapted_projection_keeps_its_own_forward() -> None:
    rows = torch.randn(4, 6, dtype=torch.float64)
    hooked = projections()
    plain = side_by_side(rows, *hooked)
    hooked[1].register_forward_hook(lambda _module, _inputs, output: output + 1)
    found = side_by_side(rows, *hooked)
    torch.testing.assert_close(found[:, 3:8], plain[:, 3:8] + 1)
    adapted = projections()
    adapted[0].__class__ = Doubled
    torch.testing.assert_close(side_by_side(rows, *adapted)[:, :3], 2 * plain[:, :3])
