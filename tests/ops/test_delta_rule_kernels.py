"""Our Triton kernels of the delta rule in Triton's interpreter: their logic, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_state_passes_and_fold_agree_with_a_plain_loop_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.state_pass_interpreted"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for errors in json.loads(run.stdout.splitlines()[-1]).values():
        assert max(errors.values()) < 1e-5, run.stdout


# Signatures of the two state passes at their usual sizes; all other pointers are bfloat16.
TYPES = {
    "*i32": (
        "initial_slots piece_offsets piece_rows piece_lengths piece_chunks piece_slots "
        "consumer_offsets consumers"
    ),
    "*fp32": "decay bank grad_bank grad_initial",
    "i32": "first_walk",
    "fp32": "scale",
}
CONSTANTS = {
    "query_heads": 4,
    "key_heads": 4,
    "groups": 4,
    "key_dim": 128,
    "value_dim": 128,
    "chunk_size": 64,
    "block": 32,
    "store_bank": True,
    "read_bank": True,
}


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("name", ["state_forward", "state_backward"])
def test_compiled_state_passes_keep_their_loop_bounds_and_use_no_register_operands(
    name: str, by_channel: bool
) -> None:
    triton = pytest.importorskip("triton", reason="needs triton")
    compiler = pytest.importorskip("triton.backends.compiler")
    from harts.ops.delta_rule.gpu import triton_kernels

    kernel = getattr(triton_kernels, name)
    known = {argument: kind for kind, names in TYPES.items() for argument in names.split()}
    constants = {
        argument: value
        for argument, value in (CONSTANTS | {"by_channel": by_channel}).items()
        if argument in kernel.arg_names
    }
    signature = {
        argument: "constexpr" if argument in constants else known.get(argument, "*bf16")
        for argument in kernel.arg_names
    }
    source = triton.compiler.ASTSource(kernel, signature, constants)
    target = compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2})
    lines = [line.strip() for line in compiled.asm["ttgir"].splitlines()]
    loops = [line for line in lines if "scf.for" in line]
    # The innermost loop over chunks starts at the constant 0, whatever the piece.
    assert " = %c0_i32 to " in loops[-1], loops[-1]
    products = [line for line in lines if "ttng.warp_group_dot " in line]
    assert len(products) == (2 if name == "state_forward" else 3)
    assert not any("dot_op" in line for line in products)
