"""A kernel that Triton gets wrong on Hopper: a tile that a product reads is summed, too."""

import triton
import triton.language as tl


@triton.jit
def reads_a_tile_twice(query, key, states, out, value_dim: tl.constexpr):
    """out [64, 64] = query [64, V] @ states [V, 64], and key @ states, and the sum of states."""
    o = tl.arange(0, 64)
    product = tl.zeros([64, 64], dtype=tl.float32)
    second = tl.zeros([64, 64], dtype=tl.float32)
    total = 0.0
    for first in range(0, value_dim, 64):
        o_v = first + o
        left = tl.load(query + o[:, None] * value_dim + o_v[None, :])
        right = tl.load(key + o[:, None] * value_dim + o_v[None, :])
        tile = tl.load(states + o_v[:, None] * 64 + o[None, :])
        total += tl.sum(tile.to(tl.float32))
        product = tl.dot(left, tile, product)
        second = tl.dot(right, tile, second)
    tl.store(out + o[:, None] * 64 + o[None, :], product + second + total)
