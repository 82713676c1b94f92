"""The prefix trie of sorted trajectories as nodes with intervals of members below them.

Shapes: N trajectories, V nodes. Depths and sizes are tokens.

Nodes are the root, the depths at which neighbours part, and one leaf a trajectory; runs of tokens
between them are edges. A trajectory that is a prefix of another, or equal to it, hangs by an edge
of length 0. Every node covers an interval of the lexicographic order.
"""

from dataclasses import dataclass

from harts.planning.intervals import IntervalWork


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTrie:
    """Nodes of the trie in lists of length V; node 0 is the root, at depth 0."""

    parent: list[int]
    depth: list[int]
    first: list[int]
    """First trajectory below the node."""
    stop: list[int]
    """Behind the last trajectory below the node."""
    children: list[list[int]]
    """In lexicographic order; empty for the leaf of a trajectory."""
    bottom_up: list[int]
    """All nodes, children before parents."""

    @classmethod
    def build(cls, work: IntervalWork) -> "PrefixTrie":
        """Build along the open path; O(V log V) time, no recursion."""
        parent, depth, first, stop = [-1], [0], [0], [len(work)]
        path = [0]
        forks = [*work.lcp[1:].tolist(), 0]
        for member, (length, fork) in enumerate(zip(work.lengths.tolist(), forks, strict=True)):
            leaf = len(parent)
            _append(parent, depth, first, stop, (path[-1], length, member, member + 1))
            path.append(leaf)
            while depth[path[-1]] > fork or path[-1] == leaf:
                lower = path.pop()
                stop[lower] = member + 1
                if depth[path[-1]] < fork:
                    node = len(parent)
                    _append(parent, depth, first, stop, (path[-1], fork, first[lower], 0))
                    path.append(node)
                parent[lower] = path[-1]
        bottom_up = sorted(range(len(parent)), key=lambda v: (-depth[v], stop[v] - first[v]))
        children: list[list[int]] = [[] for _ in parent]
        for node in sorted(range(1, len(parent)), key=first.__getitem__):
            children[parent[node]].append(node)
        return cls(
            parent=parent,
            depth=depth,
            first=first,
            stop=stop,
            children=children,
            bottom_up=bottom_up,
        )

    def edge(self, node: int) -> int:
        """Tokens between a node and its parent."""
        return self.depth[node] - self.depth[self.parent[node]]


def _append(
    parent: list[int],
    depth: list[int],
    first: list[int],
    stop: list[int],
    values: tuple[int, int, int, int],
) -> None:
    for column, value in zip((parent, depth, first, stop), values, strict=True):
        column.append(value)
