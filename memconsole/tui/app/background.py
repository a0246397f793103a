"""Ctrl-Z: back to the shell, with the console waiting until `fg`."""

from __future__ import annotations

import os
import signal


def shell_waits() -> bool:
    """Whether a shell with job control would take over the terminal: the leader of this process group then has a parent
    in the same session, but in another group. (POSIX calls a group without one orphaned; nobody could continue it.)"""
    import psutil

    try:
        parent = psutil.Process(os.getpgrp()).ppid()
        return os.getsid(parent) == os.getsid(0) and os.getpgid(parent) != os.getpgrp()
    except (psutil.Error, OSError):
        return False


def to_background() -> None:
    """Suspend every process of this group, as the terminal itself does at Ctrl-Z: a script around the console, too."""
    os.killpg(os.getpgrp(), signal.SIGTSTP)
