"""Memory, threads and error reports of processes that compute for clients."""

from __future__ import annotations

import ctypes
import functools
import os
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from fedveil.errors import DataError, DivergedError, FedveilError

_IMPORTED_BY = os.getpid()  # another process that runs this code was forked from that one
_KINDS = {kind.__name__: kind for kind in (DataError, DivergedError)}  # errors that callers distinguish


def failure(error: Exception) -> dict[str, str]:
    """A worker's reply in place of its result; `raise_failure` turns it back into an error."""
    if isinstance(error, FedveilError):
        return {"error": str(error), "kind": type(error).__name__, "field": error.field}
    return {"crash": "".join(traceback.format_exception(error))}


def raise_failure(reply: Mapping[str, str]) -> NoReturn:
    """Raise the error of a worker process."""
    if "error" in reply:
        raise _KINDS.get(reply["kind"], FedveilError)(reply["error"], field=reply["field"])
    raise RuntimeError("in a worker process:\n" + reply["crash"])


@functools.cache
def _system_function(name: str) -> Callable[..., int] | None:
    """A function of the C libraries in this process, if they have it."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def let_threads_sleep() -> None:
    """Pause OpenMP's threads, which spin for milliseconds after the server's step on cores that the workers need.

    Does nothing in a forked process: its parent's threads do not exist there, and OpenMP would wait for them.
    """
    pause = _system_function("omp_pause_resource_all")
    if pause is not None and os.getpid() == _IMPORTED_BY:
        pause(1)  # omp_pause_soft: they wake at the next step


def keep_freed_memory() -> None:
    """Let this process keep freed memory, which glibc would otherwise return and request again at every step."""
    mallopt = _system_function("mallopt")
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)
