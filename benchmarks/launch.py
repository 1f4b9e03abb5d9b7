"""Runs one command and writes what it took; small, so that nothing of its own counts.

    python -I -S launch.py RESULT COMMAND...

A process that is started from a large one has that one's memory in its peak (Linux keeps it over
the exec), so `benchmarks.timed` starts commands from here. Imports only what is built in.
"""

import os
import sys
import time


def main() -> None:
    """Run, wait, write."""
    begun_s = time.perf_counter()
    pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - begun_s
    cpu_s = usage.ru_utime + usage.ru_stime
    figures = (wall_s, cpu_s, usage.ru_maxrss * 1024, usage.ru_inblock * 512)
    with open(sys.argv[1], "w", encoding="ascii") as file:
        file.write(" ".join(map(str, figures)))
    sys.exit(os.waitstatus_to_exitcode(status) % 256)


main()
