# SPDX-License-Identifier: Apache-2.0
"""Communicators and plans as torch's operators take them: by numbers, which torch.compile sees through.

An operator gets the handle of an object, a number, and every size that its result depends on, as numbers beside it. So
what is compiled for one packing serves all others. Handles hold weakly: an object lives as long as its caller, a cache
or a graph of autograd has it, and whose object is gone raises cpx.Error.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import cpx
from cpx import _ext
from cpx._error import Error, require

# Weak references of handles; a WeakValueDictionary takes four times as long to find one.
_objects: dict[int, weakref.ref[Any]] = {}
# Of communicators of package cpx: handle and plans.
_known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_handles = itertools.count(1)

Plan = TypeVar("Plan")
cached_plans = 256  # of one communicator: more than one step uses, with plans of the steps before
dropped_plans = 64  # of them, the oldest, at once: one by one each would be dropped by code that no cache has


class _Held:
    """What has a handle. `of` is the object of package cpx."""

    of: Any
    handle: int = 0  # of none

    def __init__(self, of: object) -> None:
        self.of = of
        self.handle = next(_handles)
        _objects[self.handle] = weakref.ref(self)

    def __copy__(self) -> Any:  # it never changes, and a copy would end its handle
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __del__(self, known: dict[int, Any] = _objects) -> None:  # costs less than a function for each reference
        known.pop(self.handle, None)


def _handle_of(thing):
    handle = next(_handles)
    _objects[handle] = weakref.ref(thing, lambda _, known=_objects: known.pop(handle))
    return handle


def held(where, what, handle):
    """Returns the object of a handle. Raises cpx.Error if it is gone."""
    known = _objects.get(handle)
    found = known and known()
    if found is None:
        raise Error(where, what, "one that lives until the last backward of its calls", "one that is gone")
    return found


class Communicator:
    """One rank's end of a group of ranks. `communicator` makes it; all that are made of one share handle and plans."""

    of: Any
    rank: int
    ranks: int
    device: torch.device
    handle: int
    kept_chunk: int

    def __init__(self, of: object) -> None:
        self.of = of
        self.rank, self.ranks, self.device = of.rank, of.ranks, torch.device(of.device)
        self.kept_chunk = getattr(of, "kept_chunk", 0)  # of devices: see there
        known = _known.get(of)
        if known is None:
            known = _known[of] = _handle_of(of), collections.OrderedDict()
        self.handle, self._plans = known

    def __copy__(self) -> "Communicator":
        return self

    def __deepcopy__(self, _: object) -> "Communicator":
        return self  # what holds one, a module or a context, can be copied

    @property
    def exchange_path(self) -> str:
        """How exchanges move rows between ranks, the same on all of them, which decide at the first one.

        "window": by one kernel that stores rows where they belong in the peers' results, where 2 to 8 GPUs of one host
        reach each other's memory (NVLink), the NCCL that is loaded has windows, and the communicator one. "messages":
        sent and received by NCCL. "undecided": there was none yet. "host": tensors are on the CPU. The bits that come
        are the same. By messages come, in any case, rows that are added, as gradients of copies are, between heads and
        heads, of more than 8 sections, of layouts of more than 32 chunks or 8 ranks, and of whole batches cut at
        multiples.
        """
        return "host" if self.device.type == "cpu" else self.of.exchange_path

    def wait(self) -> None:
        """Waits until the device has done all that this rank gave it in the current stream; on the host, not at all.

        Raises cpx.Error that names the ranks that did not come within the deadline, or that moved rows of another
        batch.
        """
        if self.device.type != "cpu":
            self.of.wait()

    def plan(self, kind: Callable[..., Plan], *key: object) -> Plan:
        """Returns kind(*key), the one of an earlier call if there is one."""
        return self._plan(kind, *key)

    def _plan(self, kind: Callable[..., Plan], *key: object) -> Plan:  # as above, for functions that tell of arguments
        at = kind, *key
        found = self._plans.get(at)
        if found is None:
            found = self._plans[at] = kind(*key)
            if len(self._plans) > cached_plans:
                for _ in range(dropped_plans):
                    self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(at)
        return found

    def __repr__(self) -> str:
        return f"cpx.torch.{self.of!r}".replace("cpx.torch.cpx.", "cpx.torch.")


AnyCommunicator = Communicator | _ext.Communicator  # what operators take


class Relayout(_Held):
    """A plan between two shardings, for one rank, and that of gradients, its transposed. `relayout` makes it."""

    of: _ext.Relayout
    rank: int
    ranks: int
    source_rows: int
    target_rows: int
    source_width: int
    target_width: int

    def __init__(self, of: _ext.Relayout, back: _ext.Relayout | None = None) -> None:
        super().__init__(of)
        (
            self.rank, self.ranks, self.source_rows, self.target_rows, self.source_width, self.target_width
        ) = of._sizes()
        self._back = back

    @property
    def back(self) -> _ext.Relayout:
        """The plan of package cpx that moves everything back."""
        if self._back is None:
            self._back = self.of.transposed()
        return self._back

    def transposed(self) -> Relayout:
        """Returns the plan that moves everything back."""
        return Relayout(self.back, self.of)


class Halo(_Held):
    """The rows beside a rank's segments, on both sides. `halo` makes it."""

    of: _ext.Halo
    rank: int
    ranks: int
    reach: int
    side: str

    def __init__(self, of: _ext.Halo) -> None:
        super().__init__(of)
        self.rank, self.ranks, self.reach, self.side = of._sizes()
        self._back: _ext.Halo | None = None

    @property
    def back(self) -> _ext.Halo:
        """The plan of package cpx of the other side."""
        if self._back is None:
            other = "before" if self.side == "after" else "after"
            self._back = cpx.halo(self.of.sharding, self.rank, self.reach, other)
        return self._back


class Carry(_Held):
    """How recurrent states are handed along the segments of a sequence. `carry` makes it."""

    of: _ext.Carry
    rank: int
    segments: int
    sequences: int
    chunks: int
    maps: int
    heads: tuple[int, ...] | None
    value_heads: int

    def __init__(self, of: _ext.Carry, heads: Sequence[int] | None = None) -> None:
        super().__init__(of)
        self.rank, self.segments, self.sequences, rows, self.maps, has_sections = of._sizes()
        self.chunks = rows // 64 + 2 * self.segments  # at most, of 64 tokens
        self.heads, self.value_heads = None, -1 if has_sections else 0
        if heads is not None:
            require(len(heads) == 4, "carry", "heads", "Heads(key_heads, value_heads, key_dim, value_dim)", heads)
            self.heads = tuple(int(n) for n in heads)
            first, last = of.sharding.heads(self.rank, self.heads[1])
            self.value_heads = last - first


class Attention(_Held):
    """The shardings of queries and keys, and heads. `attention_plan` makes it."""

    queries: _ext.Sharding
    keys: _ext.Sharding
    heads: tuple[int, ...]
    rank: int
    query_heads: int

    def __init__(self, queries: _ext.Sharding, keys: _ext.Sharding, heads: tuple[int, ...], rank: int) -> None:
        super().__init__(None)
        self.queries, self.keys, self.heads, self.rank = queries, keys, heads, rank
        first, last = queries.heads(rank, heads[0])
        self.query_heads = last - first


class Positions(_Held):
    """Positions of a rank's rows, and which of them hold placeholders. `mrope_positions` makes it.

    axes: (3, rows) int64, time, height and width, as `rotary` takes them. All its tensors are on the ranks' device.
    """

    of: _ext.Positions
    device: torch.device
    axes: torch.Tensor

    def __init__(self, of: _ext.Positions, device: torch.device) -> None:
        super().__init__(of)
        self.device = device
        self.axes = torch.from_numpy(of.axes).to(device)

    def placeholders(self, kind: str) -> torch.Tensor:
        """Returns the rank's rows that hold placeholders of a kind, "image" or "video": int64, ascending."""
        return torch.from_numpy(self.of.placeholders(kind)).to(self.device)

    def features(self, kind: str) -> _ext.Sharding:
        """Returns the sharding of a kind's features by placeholder: where `relayout` brings them."""
        return self.of.features(kind)

    def deltas(self, comm: AnyCommunicator) -> torch.Tensor:
        """Returns (sequences,) int64: by how much the position of a token decoded behind a sequence differs from its
        number in the sequence. Collective."""
        return torch.from_numpy(self.of.deltas(taken_comm("mrope_positions", comm).of)).to(self.device)


def _taken(where, what, given, kind, base):
    """Returns an object of this module. One of package cpx gets a handle that lives as long as this call needs it."""
    if isinstance(given, kind):
        return given
    made_by = f"cpx.torch.{kind.__name__.lower()}"
    its = "cpx.run" if base is cpx.Communicator else f"cpx.{kind.__name__.lower()}"
    if torch.compiler.is_compiling():
        raise Error(where, what, f"one of {made_by}, made outside of what is compiled", "another object")
    if not isinstance(given, base):
        raise Error(where, what, f"one of {made_by} or of {its}", type(given).__name__)
    return kind(given)


def taken_comm(where, given):
    return given if isinstance(given, Communicator) else _taken(where, "comm", given, Communicator, cpx.Communicator)


def taken_plan(where, given, kind):
    return given if isinstance(given, kind) else _taken(where, "plan", given, kind, getattr(cpx, kind.__name__))


def relayout(source: _ext.Sharding, target: _ext.Sharding, comm: AnyCommunicator) -> Relayout:
    """Returns the plan by which this rank and all others move a tensor from one sharding to another.

    Pure: no communication. Kept by the communicator: a second call of the same shardings costs a look-up.
    """
    comm = taken_comm("relayout", comm)
    return comm._plan(_relayout, source, target, comm.rank)


def halo(sharding: _ext.Sharding, comm: AnyCommunicator, reach: int, side: str = "before") -> Halo:
    """Returns the plan by which this rank gets the `reach` rows beside each of its segments. Kept as of `relayout`.

    Of a convolution of K taps: reach K - 1, "before".
    """
    comm = taken_comm("halo", comm)
    return comm._plan(_halo, sharding, comm.rank, reach, side)


def carry(
    sharding: _ext.Sharding, comm: AnyCommunicator, how: str = "scan", heads: Sequence[int] | None = None
) -> Carry:
    """Returns the plan by which this rank hands recurrent states on: how as of `cpx.carry`. Kept as of `relayout`.

    heads: Heads(...) of all ranks, where a rank holds a share of the heads; else they are those of q and v.
    """
    comm = taken_comm("carry", comm)
    return comm._plan(_carry, sharding, comm.rank, how, None if heads is None else tuple(heads))


# By the extension itself: of wrong arguments the functions above tell.


def _relayout(source, target, rank):
    return Relayout(_ext.relayout(source, target, rank))


def _halo(sharding, rank, reach, side):
    return Halo(_ext.halo(sharding, rank, reach, side))


def _carry(sharding, rank, how, heads):
    return Carry(_ext.carry(sharding, rank, how), heads)
