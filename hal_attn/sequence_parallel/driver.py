"""What the CUDA driver can put into a stream and PyTorch cannot: copies by engines, and flags in memory.

Each acts on the current device, which must be that of the stream: a default stream has one handle on all of them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch

_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class Copy(NamedTuple):
    """`rows` rows of `width` bytes each, from one address to another; a pitch is what lies between two rows' starts."""

    target: int
    source: int
    width: int
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


class _Side(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _Side), ("target", _Side), ("width", ctypes.c_size_t), ("rows", ctypes.c_size_t))


@cache
def driver() -> Any:
    """The driver's library; raises OSError where there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Rectangle), ctypes.c_void_p]
    return library


def copy(stream: torch.cuda.Stream, what: Copy) -> None:
    """`stream` copies, by an engine where it goes to another GPU."""
    if not (what.width and what.rows):
        return None
    if what.rows == 1 or what.width == what.target_pitch == what.source_pitch:
        size = what.width * what.rows
        status = driver().cuMemcpyDtoDAsync_v2(what.target, what.source, size, stream.cuda_stream)
        return _check(status, "cuMemcpyDtoDAsync")
    source = _Side(0, 0, _ON_DEVICE, None, what.source, None, what.source_pitch)
    target = _Side(0, 0, _ON_DEVICE, None, what.target, None, what.target_pitch)
    rectangle = _Rectangle(source, target, what.width, what.rows)
    return _check(driver().cuMemcpy2DAsync_v2(ctypes.byref(rectangle), stream.cuda_stream), "cuMemcpy2DAsync")


def wait(stream: torch.cuda.Stream, flag: int, number: int) -> None:
    """`stream` goes on once the flag has reached `number`; CU_STREAM_WAIT_VALUE_GEQ, which takes numbers as cyclic."""
    status = driver().cuStreamWaitValue32_v2(stream.cuda_stream, flag, number & 0xFFFFFFFF, 0)
    _check(status, "cuStreamWaitValue32")


def set_flag(stream: torch.cuda.Stream, flag: int, number: int) -> None:
    """`stream` sets the flag after all before it, which other GPUs then see too (CU_STREAM_WRITE_VALUE_DEFAULT)."""
    status = driver().cuStreamWriteValue32_v2(stream.cuda_stream, flag, number & 0xFFFFFFFF, 0)
    _check(status, "cuStreamWriteValue32")


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name} failed with status {status} of the CUDA driver")
