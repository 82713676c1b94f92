"""What the compiler is told of operators that it does not see into."""

import pytest
import torch
from torch import Tensor

from harts.ops.compilation import uncompiled


def one(x: Tensor) -> Tensor:
    return 2 * x


def two(x: Tensor) -> tuple[Tensor, ...]:
    return x[:, :2] + 1, x[:, 2:].unflatten(1, (2, 2)) + 1


def known(x: Tensor) -> tuple[int | None, ...]:
    """The sizes of a traced tensor, None for those that may vary."""
    return tuple(size if isinstance(size, int) else None for size in x.shape)


@pytest.mark.parametrize(
    ("operator", "shapes"), [(one, [(None, 6)]), (two, [(None, 2), (None, 2, 2)])]
)
def test_outputs_have_sizes_that_the_compiler_knows_but_for_the_rows(
    operator: object, shapes: list[tuple[int | None, ...]]
) -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        found = (node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder"))
        seen.append([known(x) for x in found if isinstance(x, Tensor)])
        return graph.forward

    opaque = uncompiled(operator)

    def model(x: Tensor) -> Tensor:
        found = opaque(x * 3)
        parts = (found,) if isinstance(found, Tensor) else found
        return sum(part.flatten(1).sum(1).cos() for part in parts)

    torch.compiler.reset()
    run = torch.compile(model, dynamic=True, backend=backend)
    for rows in (5, 9):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(run(x), model(x))
    assert len(seen) == 2
    assert seen[1] == shapes
