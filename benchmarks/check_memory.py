"""Small cases of every compiled operator under compute-sanitizer: bad accesses and races.

    python benchmarks/check_memory.py            all cases, memcheck and racecheck
    python benchmarks/check_memory.py kda        one case

Needs a GPU and CUDA's compute-sanitizer on the PATH. Exits 1 when a tool finds something.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = (
    "kda",
    "gated-delta-net",
    "convolution",
    "heads",
    "swiglu",
    "log-probs",
    "attention",
)
TOOLS = ("memcheck", "racecheck")


def run(case: str, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "tests.ops.gpu.small_cases", case],
        cwd=ROOT,
        # Every tensor its own allocation, so that an access past its end is seen.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main() -> int:
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer was not found on the PATH; it comes with the CUDA toolkit")
    failed = 0
    for case in sys.argv[1:] or CASES:
        # Without a tool first: kernels are compiled, and a plain fault is shown as it is.
        plain = run(case)
        print(f"{case}: {'runs' if plain.returncode == 0 else plain.stdout}", flush=True)
        failed += plain.returncode != 0
        for tool in TOOLS:
            # Compilers are other processes, of no interest here.
            options = ("--target-processes", "application-only", "--error-exitcode", "9")
            found = run(case, "compute-sanitizer", "--tool", tool, *options)
            summary = [line for line in found.stdout.splitlines() if "SUMMARY" in line]
            print(f"{case}, {tool}: {summary or found.stdout}", flush=True)
            if found.returncode:
                failed += 1
                print(found.stdout)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
