"""Settings of the C library's heap, for rows that would mostly measure the heap.

By default glibc's malloc returns large memory to the kernel as soon as it is free, and gets it again page by page:
26,000 page faults for a pass over layers of 100 MB, a fifth of its time. In threads other than the main thread it keeps
more. So such a row would show in which thread a framework runs a pass.
"""

import ctypes

__all__ = ["keep"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def keep() -> None:
    """Keep freed memory in this process, in every thread, except blocks over 32 MB.

    Does nothing if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 64 << 20), (_MMAP_THRESHOLD, 32 << 20)):
        mallopt(parameter, value)
