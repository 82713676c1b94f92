"""Lower bound on total work from the sizes of what cannot be divided at a profit.

Notation as in `harts.planning.bound`. Call a node *fitting* if everything below it, with its path,
is within capacity, and *heavy* otherwise (the root counts as heavy).

*Units.* Below every heavy node p hang fitting subtrees. Each is cut into units with edges of their
own: a unit has a *core* x, which is a leaf or a node with d(x) >= 2 d(p), owns everything below x
and a chain of edges from x up to its anchor p. The core of greatest path-and-subtree size goes
first; the subtrees that hang off its chain are cut in the same way, anchored where they hang. At a
heavy node the largest unit's chain goes on upwards. So units share no edge. A microbatch that holds
a whole core computes all of its unit's edges: relative to a heavy node v above, at least
``min(size - top, size - d(v))`` tokens, with ``size`` the work of the core with its path from the
root and ``top`` the depth where its chain ends.

*Counting.* Take any plan with crossings m, and let q(v) be the number of cores below v that it
splits among microbatches; leaves are never split. Change its crossings: for every split core with
anchor p, one more on every edge above p and one less on every edge of the chain between p and x,
where there were at least two. The sum of length times crossings grows by d(p) - (d(x) - d(p)) <= 0.
After the change every heavy node v has m'(v) = m(v) + q(v), and these relations hold:

* m'(v) is at least the number of bins of room T - d(v) that all units below v need by dual feasible
  functions. The whole ones need no more than m(v), and a function adds at most 1 for a split one.
* m'(v) >= m'(u) for every child u, and edges of fitting subtrees are crossed at least once.
* W'(v) <= m'(v) (T - d(v)): a split core adds at most (d(p) - d(v)) - (d(x) - d(p)) <= 0 to W(v).

So the least sum of length times crossings that meets them, found bottom-up, bounds total work.

Shapes: U units, N trajectories; work in compact tokens.
"""

from dataclasses import dataclass

import numpy as np

from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.trie import PrefixTrie

PACKED_NODES = 128
"""Heavy nodes whose units are packed: those whose edges are crossed for the most tokens."""


@dataclass(slots=True)
class _Unit:
    first: int
    """Lowest trajectory of the core."""
    size: int
    top: int


def packing_bound(work: IntervalWork, trie: PrefixTrie, capacity: int) -> int:
    """Tokens that no plan can go below, whatever D; every length must be within ``capacity``."""
    sizes = work.work(np.array(trie.first), np.array(trie.stop)).tolist()
    heavy = [size > capacity for size in sizes]
    heavy[0] = True
    units = sorted(_units(trie, sizes, heavy), key=lambda unit: unit.first)
    first = np.array([unit.first for unit in units])
    size = np.array([unit.size for unit in units])
    top = np.array([unit.top for unit in units])
    forced = [1] * len(sizes)
    for node in _worth_packing(trie, sizes, heavy, capacity):
        low, high = np.searchsorted(first, (trie.first[node], trie.stop[node]))
        depth = trie.depth[node]
        items = size[low:high] - np.maximum(top[low:high], depth)
        forced[node] = bins_needed(items, capacity - depth)
    below = [0] * len(sizes)
    for node in trie.bottom_up:
        children, depth = trie.children[node], trie.depth[node]
        below[node] = sum(below[u] + forced[u] * (trie.depth[u] - depth) for u in children)
        if heavy[node] and children:
            room = capacity - depth
            by_room = -(-below[node] // room) if room else 1
            forced[node] = max(forced[node], by_room, *(forced[u] for u in children))
    return below[0]


def bins_needed(items: IntArray, room: int) -> int:
    """Bins of ``room`` that indivisible ``items`` need at least, by dual feasible functions.

    For every threshold a <= room/2 an item counts 1 if above room - a, item/room if between, and 0
    if below a; and for k = 2..6 it counts floor((k+1) item/room)/k, or item/room where that floor
    is exact. In every bin either count is at most 1 (Martello and Toth 1990; Fekete and Schepers
    2001). At least 1.
    """
    items = np.sort(items[items > 0])
    if not items.size or room < 1:
        return 1
    cumulative = np.concatenate(([0], np.cumsum(items)))
    small = items * 2 <= room
    thresholds = np.concatenate(([1], items[small], room - items[~small]))
    low = np.searchsorted(items, thresholds, side="left")
    high = np.maximum(low, np.searchsorted(items, room - thresholds, side="right"))
    between = cumulative[high] - cumulative[low]
    best = max(1, int((items.size - high - (-between // room)).max()))
    above_half = int((~small).sum())
    best = max(best, above_half)
    for k in range(2, 7):
        steps, rest = np.divmod(items * (k + 1), room)
        exact = rest == 0
        # Both terms over the common denominator k * room.
        count = int(steps[~exact].sum()) * room + int(items[exact].sum()) * k
        best = max(best, -(-count // (k * room)))
    return best


def _worth_packing(
    trie: PrefixTrie, sizes: list[int], heavy: list[bool], capacity: int
) -> list[int]:
    """Inner heavy nodes by edge length times the crossings that room alone asks for."""

    def tokens(node: int) -> int:
        depth = trie.depth[node]
        return trie.edge(node) * (sizes[node] - depth) // max(1, capacity - depth)

    nodes = [v for v in range(1, len(sizes)) if heavy[v] and trie.children[v]]
    return sorted(nodes, key=lambda v: (-tokens(v), v))[:PACKED_NODES]


def _units(trie: PrefixTrie, sizes: list[int], heavy: list[bool]) -> list[_Unit]:
    units: list[_Unit] = []
    largest: dict[int, _Unit] = {}
    for node in trie.bottom_up:
        if not heavy[node] or not trie.children[node]:
            continue
        meeting = []
        for child in trie.children[node]:
            if heavy[child] and child in largest:
                unit = largest.pop(child)
                unit.top = trie.depth[node]
            else:
                cut = _cut(trie, sizes, node, child)
                units += cut
                unit = cut[0]
            meeting.append(unit)
        largest[node] = max(meeting, key=lambda unit: unit.size)
    return units


def _cut(trie: PrefixTrie, sizes: list[int], anchor: int, subtree: int) -> list[_Unit]:
    """Units of a fitting subtree; the first is the one whose chain reaches the anchor."""
    units = []
    pending = [(anchor, subtree)]
    while pending:
        anchor, subtree = pending.pop()
        core = _core(trie, sizes, anchor, subtree)
        units.append(_Unit(trie.first[core], sizes[core], trie.depth[anchor]))
        while core != subtree:
            parent = trie.parent[core]
            pending += [(parent, u) for u in trie.children[parent] if u != core]
            core = parent
    return units


def _core(trie: PrefixTrie, sizes: list[int], anchor: int, subtree: int) -> int:
    """Largest leaf, or node twice as deep as the anchor, within a subtree."""
    best, pending = -1, [subtree]
    while pending:
        node = pending.pop()
        if trie.children[node] and trie.depth[node] < 2 * trie.depth[anchor]:
            pending += trie.children[node]
        elif best < 0 or (sizes[node], -node) > (sizes[best], -best):
            best = node
    return best
