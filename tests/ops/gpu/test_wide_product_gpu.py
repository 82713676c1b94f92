"""The router's product in parts on matrix units, against float64 and PyTorch's float32 product."""

import pytest
import torch

from harts.ops.wide_product import wide_product
from tests.ops.test_wide_product import errors_beside_float32, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(65_534, 1536, 128), (1, 64, 8), (7, 99, 5)]
)
def test_parts_are_as_near_to_float64_as_float32_is(rows, width, outputs):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight, grad = (
        torch.randn(*shape, generator=generator, device="cuda")
        for shape in ((rows, width), (outputs, width), (rows, outputs))
    )
    hidden, weight = hidden.bfloat16(), weight * 0.02
    for ours, theirs in errors_beside_float32(wide_product, hidden, weight, grad):
        # Matrix units cut off what they add a little below float32's last digit.
        assert ours < 3 * theirs + 1e-7
    runs = [with_gradients(wide_product, hidden, weight, grad) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
