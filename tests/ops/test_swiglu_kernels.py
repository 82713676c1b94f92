"""Triton kernels of the weighted SwiGLU without a GPU: their logic, and what is compiled."""

import pytest

from tests.ops.compiled_kernels import memory_instructions, ptx_of
from tests.ops.interpreter import run_interpreted

# bfloat16 is cut off instead of rounded in the interpreter; float32 is not counted in units.
BOUNDS = {"bfloat16": 1.001, "float16": 0.501, "float32": 5e-7}


def test_kernels_agree_with_plain_pytorch_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    for name, errors in run_interpreted("swiglu_interpreted").items():
        dtype, of_weights = name.split("torch.")[1:]
        bounds = {"weights": BOUNDS[of_weights]}
        for what, error in errors.items():
            assert error < bounds.get(what, BOUNDS[dtype.partition(",")[0]]), (name, what, error)


@pytest.mark.parametrize("width", [512, 768, 1408, 64])
def test_rows_are_read_sixteen_bytes_at_a_time_and_round_alike_anywhere_in_a_tile(
    width: int,
) -> None:
    """Once each: gate, up and gradient in backward. Only the weights are single numbers."""
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    from harts.ops.swiglu import triton_kernels as kernels

    numbers = 8 * 32
    for launch, kernel, reads, writes in (
        (kernels._FORWARD, kernels._swiglu_kernel, 2, 1),
        (kernels._BACKWARD, kernels._swiglu_backward_kernel, 3, 2),
    ):
        ptx = ptx_of(kernel, "bf16", kernels._options(launch, width))
        assert "fma.rn" not in ptx
        found = memory_instructions(ptx)
        assert set(found) - {"ld.global.b16", "st.global.b16"} == {
            "ld.global.v4.b32",
            "st.global.v4.b32",
        }
        each = launch.tile // (launch.warps * numbers)
        assert found["ld.global.v4.b32"] == reads * each
        assert found["st.global.v4.b32"] == writes * each
        assert found["st.global.b16"] <= 1
