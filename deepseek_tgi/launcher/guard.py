"""Runs a program in a process group of its own that the kernel kills when its parent dies. Started by path.

Argv: the parent's pid, then the program. Standard library only: `python -I -S` runs it in a few milliseconds.
Choice: a step before `exec`. Prevents: orphans when the launcher is killed (even a router that is not ours), without
code between fork and exec of a process that has threads. Rejected: `preexec_fn`, which may deadlock there.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program; 127 if it cannot be run, 1 if the parent is gone already."""
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


if __name__ == "__main__":
    main()
