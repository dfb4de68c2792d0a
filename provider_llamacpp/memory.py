"""Gives memory back to the system once an answer of megabytes is gone.

The C library keeps what was freed for the threads of the heap it came from: after a dozen answers
of 8 MiB at once that was 340 MiB on two cores, and with this a fifth of it.
"""

from __future__ import annotations

from typing import Final

LARGE: Final = 1 << 20
"""Bytes read for one answer from which on there is something to give back."""


def give_back() -> bool:
    """Have the C library return what is free; takes milliseconds.

    :returns: whether it can: glibc does
    """
    try:
        import ctypes  # rare, and half a megabyte

        trim = ctypes.CDLL(None).malloc_trim
    except (ImportError, OSError, TypeError, AttributeError):
        return False
    trim(0)
    return True
