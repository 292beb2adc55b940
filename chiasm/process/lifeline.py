"""`python lifeline.py PARENT PROGRAM ARGUMENTS...`: becomes a program that ends with its parent.

A program of its own: code of ours between fork and exec would not be safe in a parent with threads,
and gRPC's handlers of fork crash in the child. So nobody forks; it is spawned, and imports little.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies (Linux); exits if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)


def main() -> None:
    """Ties this process to its parent, then becomes the program."""
    parent, *command = sys.argv[1:]
    end_with_parent(int(parent))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
