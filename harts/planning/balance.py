"""Even out the work of microbatches that share a slot, without changing total work.

If two microbatches both cross a trie node, a part of one below that node and a part of the other
can change places, or one part can move over, and every edge is still crossed by as many
microbatches as before: total work (Eq. 5) stays, the works of the two change by the difference of
the parts. A slot waits for its heaviest microbatch, so that one is made lighter by the exchange
that lowers the sum of slot maxima (second term of Eq. 4) most.

Parts are whole children of a node within one microbatch. An exchange between parts of different
children needs that neither microbatch already holds some of the other's child; parts of the same
child may always be exchanged. The search is bounded by the number of exchanges, never by a clock.

Shapes: N trajectories, K microbatches, D replicas; work in compact tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.planning.grouping import compact_works, in_order
from harts.planning.intervals import IntArray, IntervalWork
from harts.planning.slot_maxima import SlotMaxima
from harts.planning.trie import PrefixTrie

PASSES = 3
"""Times that slots are formed anew and gone through."""
EVEN_ENOUGH = 5e-5
"""Excess of a slot's maximum over its mean that is not worth an exchange."""
EXCHANGES_PER_NODE = 256
"""Exchanges weighed at one node for one microbatch; of more, evenly spread ones."""
HOLDERS_PER_NODE = 256
"""Microbatches whose parts at one node are on offer."""
OFFERS = 800
"""Microbatches for which an exchange is sought, over all passes."""
CROSSINGS_LIMIT = 2_000_000
"""Nodes crossed, summed over microbatches, beyond which balancing would take too long."""


def balance_slots(
    work: IntervalWork, trie: PrefixTrie, groups: list[IntArray], replicas: int, capacity: int
) -> list[IntArray]:
    """Groups of equal total work whose sum of slot maxima is no larger; K stays.

    Needs a count that D divides. Returns the groups unchanged where nothing helps.
    """
    if replicas == 1 or len(groups) < 2:
        return groups
    search = _Exchanges(work, trie, groups, capacity)
    if search.too_large:
        return groups
    for _ in range(PASSES):
        if not search.sweep(replicas):
            break
    return search.groups()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """All parts below one node, microbatch after microbatch; each [n] but for ``first``.

    Behind a microbatch's parts stands the child -1 of size 0, for nothing.
    """

    owner: IntArray
    child: IntArray
    size: IntArray
    first: IntArray
    """First part of each microbatch."""
    count: IntArray
    """Parts of each microbatch; as long as ``first``."""
    kept: NDArray[np.bool_]
    """Whether the owner has another part at the node."""
    room: IntArray
    """Capacity left to the owner."""


class _Exchanges:
    """Members and works [K] under change, with the parts that each microbatch has at each node."""

    def __init__(
        self, work: IntervalWork, trie: PrefixTrie, groups: list[IntArray], capacity: int
    ) -> None:
        self.trie = trie
        self.capacity = capacity
        self.leaf_of = _leaves(trie)
        self.members: list[list[int]] = [group.tolist() for group in groups]
        self.works = compact_works(work, groups)
        self.rank = [0] * len(trie.parent)
        for rank, node in enumerate(trie.bottom_up):
            self.rank[node] = rank
        crossings: list[int] = [0] * len(trie.parent)
        self.too_large = False
        self.offers = OFFERS
        budget, crossed = CROSSINGS_LIMIT, list[list[int]]()
        for members in self.members:
            crossed.append(self._crossed(members))
            for node in crossed[-1]:
                crossings[node] += 1
            budget -= len(crossed[-1])
            if budget < 0:
                self.too_large = True
                return
        self.common = [count > 1 for count in crossings]
        self.holders: dict[int, set[int]] = {}
        self.parts: list[dict[int, dict[int, int]]] = [{} for _ in groups]
        self.cache: dict[int, _Parts] = {}
        for k, nodes in enumerate(crossed):
            self._index(k, nodes)

    def groups(self) -> list[IntArray]:
        return in_order(np.array(sorted(members), np.int64) for members in self.members)

    def sweep(self, replicas: int) -> bool:
        """Offer both ends of uneven slots their best exchange; whether any was taken."""
        self.maxima = SlotMaxima.build(self.works, replicas)
        improved = False
        order = np.argsort(-self.works, kind="stable")
        slots = self.works[order].reshape(-1, replicas)
        excess = slots.max(axis=1) * replicas - slots.sum(axis=1)
        uneven = excess > EVEN_ENOUGH * slots.sum(axis=1)
        for j in np.argsort(-excess, kind="stable").tolist():
            row = order[j * replicas : (j + 1) * replicas].tolist() if uneven[j] else []
            for giver in row[:1] + row[-1:]:
                self.offers -= 1
                if self.offers < 0:
                    return False
                improved |= self._improve(giver, replicas)
        return improved

    def _improve(self, giver: int, replicas: int) -> bool:
        """Take the exchange that leaves the least sum of slot maxima, if it is less than now."""
        nodes = [node for node in self.parts[giver] if len(self.holders[node]) > 1]
        if not nodes:
            return False
        found = [self._neutral(giver, node) for node in nodes]
        given, taker, taken, amount = np.concatenate(found, axis=1)
        if not amount.size:
            return False
        totals = self.maxima.after(giver, taker, amount)
        best = int(np.argmin(totals))
        if totals[best] >= self.maxima.total:
            return False
        self._apply(giver, int(taker[best]), int(given[best]), int(taken[best]), int(amount[best]))
        self.maxima = SlotMaxima.build(self.works, replicas)
        return True

    def _neutral(self, giver: int, node: int) -> IntArray:
        """Neutral exchanges at a node, rows (child given, taker, child taken, amount); [4, n].

        Child -1 stands for nothing. A microbatch that only gives must keep something at the node,
        or fewer edges would be crossed.
        """
        parts, own = self._at(node), self.parts[giver][node]
        child, size = np.array([[*own, -1], [*own.values(), 0]], np.int64)
        same = child[:, None] == parts.child
        held = same[:-1]
        holds = np.repeat(np.logical_or.reduceat(held, parts.first, axis=1), parts.count, axis=1)
        allowed = np.empty_like(same)
        allowed[:-1], allowed[-1] = ~holds, parts.kept
        allowed &= ~held.any(axis=0)
        if len(own) == 1:
            allowed[:-1] &= parts.child >= 0
        allowed[:-1] |= held
        amount = size[:, None] - parts.size
        allowed &= (amount <= parts.room) & (amount != 0) & (parts.owner != giver)
        allowed &= amount >= self.works[giver] - self.capacity
        row, column = np.nonzero(allowed)
        step = -(-row.size // EXCHANGES_PER_NODE) or 1
        row, column = row[::step], column[::step]
        return np.stack((child[row], parts.owner[column], parts.child[column], amount[row, column]))

    def _at(self, node: int) -> _Parts:
        """Parts at a node, of evenly spread holders."""
        if node not in self.cache:
            holders = sorted(self.holders[node])
            holders = holders[:: -(-len(holders) // HOLDERS_PER_NODE)]
            found = [self.parts[k][node] for k in holders]
            count = np.array([len(parts) + 1 for parts in found])
            owner = np.repeat(holders, count)
            self.cache[node] = _Parts(
                owner=owner,
                child=np.array([child for parts in found for child in (*parts, -1)]),
                size=np.array([size for parts in found for size in (*parts.values(), 0)]),
                first=np.cumsum(count) - count,
                count=count,
                kept=np.repeat(count > 2, count),
                room=self.capacity - self.works[owner],
            )
        return self.cache[node]

    def _apply(self, giver: int, taker: int, given: int, taken: int, amount: int) -> None:
        """Exchange the members below two children, -1 for none, and renew both microbatches."""
        out, back = self._below(giver, given), self._below(taker, taken)
        for k in (giver, taker):
            for node in self.parts[k]:
                self.holders[node].discard(k)
                self.cache.pop(node, None)
        self.members[giver] = sorted({*self.members[giver]} - {*out} | {*back})
        self.members[taker] = sorted({*self.members[taker]} - {*back} | {*out})
        self.works[giver] -= amount
        self.works[taker] += amount
        for k in (giver, taker):
            self._index(k, self._crossed(self.members[k]))

    def _below(self, microbatch: int, node: int) -> list[int]:
        if node < 0:
            return []
        first, stop = self.trie.first[node], self.trie.stop[node]
        return [member for member in self.members[microbatch] if first <= member < stop]

    def _index(self, microbatch: int, crossed: list[int]) -> None:
        """Work of every part of a microbatch at every node that others cross too."""
        trie, common = self.trie, self.common
        below: dict[int, int] = {}
        parts: dict[int, dict[int, int]] = {}
        for node in crossed[:-1]:  # the root is last
            parent = trie.parent[node]
            size = below.pop(node, 0) + trie.depth[node] - trie.depth[parent]
            below[parent] = below.get(parent, 0) + size
            if common[parent] and size:
                parts.setdefault(parent, {})[node] = size
        self.parts[microbatch] = parts
        for node in parts:
            self.holders.setdefault(node, set()).add(microbatch)
            self.cache.pop(node, None)

    def _crossed(self, members: Iterable[int]) -> list[int]:
        """Nodes with a member at or below them, children before parents."""
        parent, crossed = self.trie.parent, set[int]()
        for member in members:
            node = self.leaf_of[member]
            while node >= 0 and node not in crossed:
                crossed.add(node)
                node = parent[node]
        return sorted(crossed, key=self.rank.__getitem__)


def _leaves(trie: PrefixTrie) -> list[int]:
    """Node of every trajectory."""
    leaves = [-1] * trie.stop[0]
    for node, below in enumerate(trie.children):
        if not below:
            leaves[trie.first[node]] = node
    return leaves
