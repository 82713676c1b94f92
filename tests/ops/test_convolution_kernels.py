"""Triton kernels of the tree convolution without a GPU: their logic, and their rounding."""

import pytest

from tests.ops.interpreter import run_interpreted


def test_kernels_agree_with_plain_pytorch_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    for name, errors in run_interpreted("convolution_interpreted").items():
        assert max(errors.values()) < 5e-6, (name, errors)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_no_sum_of_products_is_left_to_the_compiler(width: int, has_bias: bool) -> None:
    """A sum that the compiler may fuse with either product rounds as each of its copies likes."""
    triton = pytest.importorskip("triton", reason="needs triton")
    compiler = pytest.importorskip("triton.backends.compiler")
    from harts.ops.convolution.triton_kernels import _forward_kernel as kernel

    constants = {"width": width, "has_bias": has_bias, "silu": False, "block": 256}
    integers = {"rows", "channels", "run"}
    tables = {"sources", "depth", "special"}
    signature = {
        name: "constexpr"
        if name in constants
        else "i32"
        if name in integers
        else "*i32"
        if name in tables
        else "*bf16"
        for name in kernel.arg_names
    }
    source = triton.compiler.ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32))
    assert "arith.addf" not in made.asm["ttgir"]
    assert made.asm["ttgir"].count("math.fma") >= width - 1 + has_bias
