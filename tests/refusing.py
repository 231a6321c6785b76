"""A kernel that refuses system calls, as Docker's default seccomp profile does those about memory nodes."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable

import pytest

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h: LD|W|ABS, JMP|JEQ|K, RET|K

NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuser(*calls: str, code: int = errno.EPERM) -> Callable[[], None]:
    """Return what has the kernel refuse these system calls to the process that runs it (a `preexec`), and for good."""
    numbers = NUMBERS.get(platform.machine())
    if numbers is None:
        pytest.skip("the numbers of the system calls are not known here")
    program = struct.pack("HBBI", _LOAD, 0, 0, 0)  # the number is the first word of struct seccomp_data
    for call in calls:
        program += struct.pack("HBBI", _IF_EQUAL, 0, 1, numbers[call]) + struct.pack(
            "HBBI", _RETURN, 0, 0, _ERRNO | code
        )
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    told = _Program(len(program) // 8, program)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)

    def refuse() -> None:
        where = ctypes.addressof(told)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
            _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, where, 0, 0
        ):
            raise OSError(ctypes.get_errno(), "seccomp")

    return refuse
