"""Small cases of every compiled operator, forward and backward, for a memory checker.

Run one: `python -m tests.ops.gpu.small_cases convolution`. `benchmarks/check_memory.py` runs all of
them under compute-sanitizer.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from harts.bench.gpu_trees import comb, index_of
from harts.bench.ops_delta_rule import rollout_tree
from harts.ops.attention import tree_attention
from harts.ops.convolution import tree_causal_convolution
from harts.ops.delta_rule import tree_delta_rule
from harts.ops.heads import normalised_heads
from harts.ops.logprobs import mapped_logprobs
from harts.ops.swiglu import weighted_swiglu
from harts.ops.tree_index import TreeIndex


def small_index() -> TreeIndex:
    """Several rounds, forks inside chunks, rows of padding."""
    return index_of(rollout_tree(rows=700, leaves=7), "cuda")


def branching_index(device: str) -> TreeIndex:
    """Short branches on a trunk, which attention reads as a shared run and merges."""
    return index_of(comb(300, 40, 5), device)


def both_ways(run: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    """Forward, backward, and no NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_()
        for shape in shapes
    ]
    out = run(*leaves)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(x.isfinite().all() for x in (out, *grads))


def delta_rule(key_dim: int, groups: int, by_channel: bool) -> None:
    index = small_index()
    rows, heads = index.rows, 2

    def run(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        query, key = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (query, key))
        out: Tensor = tree_delta_rule(
            query.bfloat16(),
            key.bfloat16(),
            value,
            -0.1 * decay.float().sigmoid(),
            beta.sigmoid(),
            index=index,
            lowest_log_decay=-5.0,
            backend="split",
        )
        return out

    decays = (rows, groups, key_dim) if by_channel else (rows, groups)
    rows_of_keys = (rows, heads, key_dim)
    both_ways(run, rows_of_keys, rows_of_keys, (rows, groups, key_dim), decays, (rows, groups))


def kda() -> None:
    delta_rule(64, 2, by_channel=True)
    delta_rule(128, 2, by_channel=True)


def gated_delta_net() -> None:
    delta_rule(64, 4, by_channel=False)
    delta_rule(128, 2, by_channel=False)


def convolution() -> None:
    index = small_index()
    for channels, width, biased in ((8, 2, True), (33, 3, False), (700, 4, True)):

        def run(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
            out: Tensor = tree_causal_convolution(x, weight, *bias, index=index, activation="silu")
            return out

        shapes = [(index.rows, channels), (channels, width), (channels,)]
        both_ways(run, *shapes[: 2 + biased])


def heads() -> None:
    """Tiles that rows fill and that they do not, heads that fill a tile's columns and do not."""
    names = ("heads", "key_dim", "groups", "value_dim")
    for rows, *shape in ((64, 4, 128, 4, 128), (37, 3, 24, 5, 40), (21, 2, 96, 4, 17)):
        sizes = dict(zip(names, shape, strict=True))

        def run(mixed: Tensor, sizes: dict[str, int] = sizes) -> Tensor:
            return torch.cat([x.flatten() for x in normalised_heads(mixed, **sizes)])

        columns = 2 * shape[0] * shape[1] + shape[2] * shape[3]
        both_ways(run, (rows, columns))


def swiglu() -> None:
    for rows, width in ((64, 512), (37, 24), (21, 1100), (3, 5)):
        both_ways(weighted_swiglu, (rows, 2 * width), (rows, 1))


def log_probs() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, vocabulary, width in ((130, 1000, 64), (70, 257, 200)):
        at = torch.randint(rows, (300,), generator=generator, device="cuda")
        targets = torch.randint(vocabulary, (300,), generator=generator, device="cuda")
        run = partial(logprobs_and_entropy, at, targets)
        both_ways(run, (rows, width), (vocabulary, width), (vocabulary,))


def logprobs_and_entropy(
    at: Tensor, targets: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    found = mapped_logprobs(hidden, weight, at, targets, bias=bias, return_entropy=True)
    return found[0] + found[1]


def attention() -> None:
    """Our kernels of gathered and summed rows, which every packed form uses.

    racecheck takes the barriers of flash-attn-4's own pipelines for races; PyTorch's
    FlashAttention it knows.
    """
    for index in (small_index(), branching_index("cuda")):
        for heads, key_value_heads, key_dim, value_dim in ((4, 4, 192, 128), (4, 2, 64, 64)):
            both_ways(
                partial(tree_attention, index=index, backend="varlen"),
                (index.rows, heads, key_dim),
                (index.rows, key_value_heads, key_dim),
                (index.rows, key_value_heads, value_dim),
            )


CASES = {
    "kda": kda,
    "gated-delta-net": gated_delta_net,
    "convolution": convolution,
    "heads": heads,
    "swiglu": swiglu,
    "log-probs": log_probs,
    "attention": attention,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        torch.cuda.synchronize()
        print(f"{name}: done", flush=True)
