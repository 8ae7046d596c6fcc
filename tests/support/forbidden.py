"""Replaces itself with a program whose system calls the kernel refuses, as a sandbox's filter does.

python -m tests.support.forbidden CALL,… ERROR PROGRAM [ARGUMENT …]

CALL is a name of `CALLS`, and ERROR one of `errno`, which they give from then on in all that the program starts.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

CALLS = {
    "x86_64": {
        "pidfd_open": 434,
        "pidfd_send_signal": 424,
        "sched_setscheduler": 144,
        "setpriority": 141,
        "prctl": 157,
        "eventfd2": 290,
        "epoll_create1": 291,
        "flock": 73,
        "socket": 41,
        "waitid": 247,
        "statx": 332,
        "membarrier": 324,
    },
    "aarch64": {
        "pidfd_open": 434,
        "pidfd_send_signal": 424,
        "sched_setscheduler": 119,
        "setpriority": 140,
        "prctl": 167,
        "eventfd2": 19,
        "epoll_create1": 20,
        "flock": 32,
        "socket": 198,
        "waitid": 95,
        "statx": 291,
        "membarrier": 283,
    },
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    """The kernel's `sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def forbid(numbers: list[int], error: int) -> None:
    """Have the kernel answer these system calls of this process, and of all that it starts, with `error`."""
    steps = [(_LOAD_NUMBER, 0, 0, 0)]
    steps += [(_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | error)]
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    for option, value, pointer in (
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0):
            raise OSError(ctypes.get_errno(), "no filter of system calls")


def main() -> None:
    """See the module."""
    names, error, *command = sys.argv[1:]
    known = CALLS[platform.machine()]
    forbid([known[name] for name in names.split(",")], getattr(errno, error))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
