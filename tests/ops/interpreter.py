"""Triton kernels in Triton's interpreter, in programs of their own.

The interpreter is chosen by the environment when kernels are defined, and must not reach any other
test. Each program prints its errors as one line of JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(module: str) -> dict[str, dict[str, float]]:
    """What `python -m tests.ops.<module>` prints under the interpreter."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.ops.{module}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, float]] = json.loads(run.stdout.splitlines()[-1])
    return found


def accept_new_numpy() -> None:
    """NumPy 2.4 no longer turns arrays of one element into integers, which Triton relies on."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
