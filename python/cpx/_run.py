# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of this process."""

import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from . import _ext
from ._error import Error

Result = TypeVar("Result")


def run(ranks: int, program: Callable[..., Result], *args: Any, deadline: float = 600.0) -> list[Result]:
    """Calls `program(comm, *args)` on as many threads, a rank each, and returns the list of what they return.

    deadline: the longest, in seconds, that a rank waits for the others in one exchange. A rank that raises ends the
    others: their next or present exchange raises cpx.Error that names it. Then `run` raises cpx.Error, from the
    exception of the rank that failed first.
    """
    comms = _ext.threads(ranks, deadline)
    results = [None] * ranks
    failures = []  # in the order in which ranks fail
    ended = threading.Semaphore(0)

    def member(rank):
        comm = comms[rank]
        try:
            results[rank] = program(comm, *args)
        except BaseException as e:  # also SystemExit: the others must not wait
            failures.append((rank, e))
            comm.fail(_reason(e))
        finally:
            try:
                comm.leave()
            finally:
                ended.release()

    members = []
    try:
        for rank in range(ranks):
            thread = threading.Thread(target=member, args=(rank,), name=f"cpx rank {rank}")
            thread.start()
            members.append(thread)
        for _ in members:
            # By intervals: of an interrupt that reached another thread, or came just before a wait began, Python learns
            # when the wait is over.
            while not ended.acquire(timeout=0.1):
                pass
    except BaseException as e:  # no more threads, or an interrupt: end those that run
        for comm in comms:
            comm.fail(_reason(e))
        raise
    finally:
        for thread in members:
            thread.join()
    if failures:
        rank, first = next((f for f in failures if not _is_echo(f[1])), failures[0])
        raise Error("threads", f"rank {rank} failed: {_reason(first)}") from first
    return results


def _is_echo(e):
    """Whether this only says that another rank has failed."""
    return isinstance(e, Error) and e.where == "threads" and re.match(r"rank \d+ failed: ", e.problem) is not None


def _reason(e):
    if isinstance(e, Error):
        return e.message()
    text = str(e)
    return f"{type(e).__name__}: {text}" if text else type(e).__name__
