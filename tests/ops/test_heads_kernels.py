"""Triton kernels of normalised heads without a GPU: their logic, and what is compiled."""

import pytest

from harts.ops.heads.reference import HeadSizes
from tests.ops.compiled_kernels import memory_instructions, ptx_of
from tests.ops.interpreter import run_interpreted

# bfloat16 is cut off instead of rounded in the interpreter; float32 is not counted in units.
BOUNDS = {"bfloat16": 1.001, "float16": 0.501, "float32": 2e-7}


def test_kernels_agree_with_plain_pytorch_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    for name, errors in run_interpreted("heads_interpreted").items():
        bound = BOUNDS[name.rpartition(".")[2]]
        assert all(error < bound for error in errors.values()), (name, errors)


@pytest.mark.parametrize(
    "sizes", [(16, 128, 16, 128), (16, 128, 32, 128), (4, 64, 4, 64), (6, 96, 6, 192)]
)
def test_heads_are_read_sixteen_bytes_at_a_time_and_round_alike_anywhere_in_a_tile(
    sizes: tuple[int, ...],
) -> None:
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    from harts.ops.heads import triton_kernels as kernels

    names = ("heads", "key_dim", "groups", "value_dim")
    for launch, kernel in (
        (kernels._FORWARD, kernels._normalised_heads_kernel),
        (kernels._BACKWARD, kernels._normalised_heads_backward_kernel),
    ):
        options = kernels._options(launch, 100, HeadSizes(**dict(zip(names, sizes, strict=True))))
        ptx = ptx_of(kernel, "bf16", options[1])
        assert "fma.rn" not in ptx
        found = memory_instructions(ptx)
        assert set(found) == {"ld.global.v4.b32", "st.global.v4.b32"}
