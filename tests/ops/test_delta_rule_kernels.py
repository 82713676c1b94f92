"""Our Triton kernels of the delta rule in Triton's interpreter: their logic, without a GPU."""

import re
from typing import Any

import pytest

from tests.ops.compiled_kernels import compiled_for_hopper
from tests.ops.interpreter import run_interpreted


def test_our_kernels_agree_with_a_plain_loop_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton, which comes with GPU builds of torch")
    found = run_interpreted("state_pass_interpreted")
    faults = {name: found.pop(name) for name in list(found) if name.startswith("fault")}
    assert len(faults) == 4
    assert len(found) == 6
    for name, errors in found.items():
        assert all(error < 1e-5 for error in errors.values()), (name, errors)
    # Rows read from the wrong part show in everything, most often as NaN.
    for name, errors in faults.items():
        assert not any(error < 1e-2 for error in errors.values()), (name, errors)


# Signatures of our kernels at their usual sizes; all other pointers are bfloat16.
TYPES = {
    "*i32": (
        "initial_slots piece_offsets piece_rows piece_lengths piece_chunks piece_slots "
        "consumer_offsets consumers cu_seqlens chunks"
    ),
    "*fp32": "decay bank grad_bank grad_initial grad_decay",
    "i32": "copied_from first_walk rows",
    "fp32": "scale",
}
CONSTANTS = {
    "heads": 4,
    "value_block": 64,
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


def compiled(kernel: Any, **constants: object) -> list[str]:
    """Lines of the intermediate form that Triton makes of a kernel for Hopper."""
    pytest.importorskip("triton", reason="needs triton")
    known = {argument: kind for kind, names in TYPES.items() for argument in names.split()}
    constants = {a: v for a, v in (CONSTANTS | constants).items() if a in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constants else known.get(argument, "*bf16")
        for argument in kernel.arg_names
    }
    launch = {"num_warps": 4, "num_stages": 2}
    forms = compiled_for_hopper(kernel, signature, constants, launch)
    return [line.strip() for line in forms["ttgir"].splitlines()]


def overwritten_operands(lines: list[str]) -> set[str]:
    """Shared tiles that a product may still read when the pipeline copies the next tile there.

    At the end of a pass through a loop some asynchronous products are still running. Their
    operands need a second buffer, since the copy for the next pass starts at once.
    """
    buffers, parents, at_risk = {}, {}, set()
    loops: list[list[tuple[str, str]]] = []
    for line in lines:
        if made := re.match(r"%(\S+) = ttg\.local_alloc *: \(\) -> !ttg\.memdesc<(\d+)x\d+x", line):
            buffers[made[1]] = int(made[2])
        elif view := re.match(r"%(\S+) = ttg\.memdesc_\w+ %([\w-]+)", line):
            parents[view[1]] = view[2]
        elif "scf.for" in line:
            loops.append([])
        elif loops and (dot := re.search(r"warp_group_dot %([\w-]+), %([\w-]+),.*isAsync", line)):
            loops[-1].append((dot[1], dot[2]))
        elif loops and (wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line)):
            loops[-1] = loops[-1][len(loops[-1]) - int(wait[1]) :] if int(wait[1]) else []
        elif loops and line.startswith("scf.yield"):
            at_risk |= {operand for operands in loops.pop() for operand in operands}
    found = set()
    for operand in at_risk:
        while operand in parents:
            operand = parents[operand]
        if buffers.get(operand) == 1:
            found.add(operand)
    return found


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("name", ["state_forward", "state_backward"])
def test_compiled_state_passes_keep_their_loop_bounds_and_use_no_register_operands(
    name: str, by_channel: bool
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    from harts.ops.delta_rule.gpu import triton_kernels

    lines = compiled(getattr(triton_kernels, name), by_channel=by_channel)
    loops = [line for line in lines if "scf.for" in line]
    # The innermost loop over chunks starts at the constant 0, whatever the piece.
    assert " = %c0_i32 to " in loops[-1], loops[-1]
    products = [line for line in lines if "ttng.warp_group_dot " in line]
    assert len(products) == (2 if name == "state_forward" else 3)
    assert not any("dot_op" in line for line in products)
    assert not overwritten_operands(lines)


def test_compiled_gradients_of_scalar_gates_overwrite_no_operand() -> None:
    pytest.importorskip("triton", reason="needs triton")
    from harts.ops.delta_rule.gpu import triton_kernels

    lines = compiled(triton_kernels.scalar_gate_gradients, block=64)
    assert sum("isAsync" in line for line in lines) == 4
    assert not overwritten_operands(lines)


def test_an_overwritten_operand_is_found() -> None:
    pytest.importorskip("triton", reason="needs triton")
    from tests.ops import faulty_kernel

    # A fault of Triton: 3.6 and 3.7.1 have it. With none to find, our second read can go.
    assert overwritten_operands(compiled(faulty_kernel.reads_a_tile_twice))
