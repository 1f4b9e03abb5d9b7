"""The directories that the files of one tree lie in where they are spread over filesystems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from imgfmt.tree import ROOT, Tree


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Entry `i` lies below the open directory `roots[of[i]]`. The first one has all directories.

    The others have of them only those that are needed. All names of a file are in one part.
    """

    roots: Sequence[int]
    of: npt.NDArray[np.int64]

    @classmethod
    def alone(cls, root: int, tree: Tree) -> Parts:
        """Everything in one part."""
        return cls((root,), np.zeros(tree.n_entries, np.int64))

    def root(self, entry: int) -> int:
        """The directory that an entry lies below."""
        return self.roots[int(self.of[entry])]

    def folders(self, tree: Tree) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
        """For each part but the first: its number, and the directories it needs, parents first."""
        parents = tree.columns["parent"].tolist() if len(self.roots) > 1 else []
        for part in range(1, len(self.roots)):
            needed: set[int] = set()
            for entry in np.flatnonzero(self.of == part).tolist():
                above = parents[entry]
                while above != ROOT and above not in needed:
                    needed.add(above)
                    above = parents[above]
            yield part, np.array(sorted(needed), np.intp)
