"""Memory in large pages, for weights that are read from end to end in every step."""

import ctypes
from ctypes import c_size_t, c_void_p

import torch
from torch import Tensor

LARGE_PAGE, MADV_HUGEPAGE = 2**21, 14  # bytes; Linux's advice, which it may well not take


def large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers, of any value, in memory that may lie in large pages.

    What the processor fetches ahead ends with a page: in pages of 4 KB reading weights takes a tenth longer.
    """
    size = dtype.itemsize
    buffer = torch.empty(count + 2 * LARGE_PAGE // size, dtype=dtype)
    start = -buffer.data_ptr() % LARGE_PAGE // size
    numbers = buffer[start : start + count]
    ctypes.CDLL(None).madvise(c_void_p(numbers.data_ptr()), c_size_t(size * count), MADV_HUGEPAGE)
    return numbers
