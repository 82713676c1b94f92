"""Benchmarks: each gates on correctness first, then measures ratios side by side in one run."""
