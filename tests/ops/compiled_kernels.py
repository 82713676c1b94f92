"""What Triton's compiler makes of our kernels for Hopper; needs no GPU."""

import re
from collections import Counter
from typing import Any

_LAUNCH = ("num_warps", "num_stages", "enable_fp_fusion")


def ptx_of(kernel: Any, dtype: str, options: dict[str, Any]) -> str:
    """The PTX of a kernel.

    Args:
        kernel: its only number that is not constant is `rows`; all else are aligned pointers.
        dtype: what the pointers point to, in Triton's name.
        options: constants of the kernel and of its launch.
    """
    launch = {name: options[name] for name in _LAUNCH}
    constants = {name: value for name, value in options.items() if name not in launch}
    signature = {
        name: "constexpr" if name in constants else "i32" if name == "rows" else f"*{dtype}"
        for name in kernel.arg_names
    }
    return compiled_for_hopper(kernel, signature, constants, launch)["ptx"]


def compiled_for_hopper(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], launch: dict[str, Any]
) -> dict[str, str]:
    """Every form that the compiler goes through, by Triton's name for it; pointers are aligned."""
    import triton
    from triton.backends.compiler import GPUTarget

    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    forms: dict[str, str] = made.asm
    return forms


def memory_instructions(ptx: str) -> Counter[str]:
    """How often each kind of global load and store occurs."""
    return Counter(re.findall(r"\b(?:ld|st)\.global[\w.]*", ptx))
