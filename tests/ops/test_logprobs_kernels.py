"""Triton kernels of the mapped log-probs in Triton's interpreter: their logic, without a GPU."""

import pytest

from tests.ops.interpreter import run_interpreted


def test_kernels_agree_with_plain_pytorch_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    for name, errors in run_interpreted("logprobs_interpreted").items():
        assert max(errors.values()) < 1e-6, (name, errors)
