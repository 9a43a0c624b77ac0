# SPDX-License-Identifier: Apache-2.0
"""Arrays that say how they are sharded, so that one of another sharding is an error and not a wrong result."""

from typing import Any

from ._error import Error
from ._ext import Sharding


class Sharded:
    """The rows that `rank` holds of a tensor that is sharded as `sharding` says: `cpx.Sharded(array, sharding, rank)`.

    array: (sharding.rows(rank), ...). Goes wherever its array goes. A plan or an operator that wants another sharding,
    or the rows of another rank, raises cpx.Error; of an input that is Sharded the result is, too.
    """

    __slots__ = {
        "array": "The array.",
        "sharding": "The `Sharding` by which it has its rows.",
        "rank": "The rank whose rows it has.",
    }

    array: Any
    sharding: Sharding
    rank: int

    def __init__(self, array: Any, sharding: Sharding, rank: int) -> None:
        rows = sharding.rows(rank)
        shape = getattr(array, "shape", None)
        if not shape or shape[0] != rows:
            raise Error("Sharded", "rows of the array", str(rows), str(shape[0]) if shape else type(array).__name__)
        self.array, self.sharding, self.rank = array, sharding, rank

    @property
    def shape(self) -> Any:
        """The array's."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """The array's."""
        return self.array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __repr__(self) -> str:
        return f"cpx.Sharded({type(self.array).__name__} {tuple(self.shape)}, {self.sharding}, rank {self.rank})"


def bare(where, name, x, sharding, rank):
    """Returns the array of x. Raises cpx.Error if x is Sharded and not what `rank` holds under `sharding`."""
    if not isinstance(x, Sharded):
        return x
    if x.sharding is not sharding and x.sharding != sharding:
        expected, got = str(sharding), str(x.sharding)
        if expected == got:
            got = "one of " + ("another batch" if x.sharding.batch != sharding.batch else "other chunks")
        raise Error(where, f"sharding of {name}", expected, got)
    if x.rank != rank:
        raise Error(where, f"rank of {name}", str(rank), str(x.rank))
    return x.array


def labelled(x, made, sharding, rank):
    """Returns a result, Sharded if the input x was."""
    return Sharded(made, sharding, rank) if isinstance(x, Sharded) else made
