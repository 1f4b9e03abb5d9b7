"""What a process of `process_fillers` runs: reads ranges of files to shared memory, hashes them.

Run as a script with three descriptors: where requests come from, where answers go, and a table of
files, slots, reads and rows. Imports little, since many of these start at once. It ends when nobody
can send requests any more.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import sys
import time

from blake3 import blake3

REQUEST = struct.Struct("<II")
"""Number of a slot, number of a read."""

ANSWER = struct.Struct("<IIIIII")
"""The request, an outcome, what belongs to it, and the microseconds of reading and hashing."""

GOOD, DIFFERS, CUT_SHORT, REFUSED = range(4)
"""Outcomes; with DIFFERS comes the number of a row, with REFUSED an errno."""

READ = struct.Struct("<IQQII")
"""File, offset, length, and the rows [first, end)."""

ROW = struct.Struct("<II32s")
HEAD = struct.Struct("<QQQ")
"""Where the table's JSON ends, its reads begin, and its rows begin."""

PAGE_BYTES = 4096
STEP_BYTES = 1 << 19
"""Read and hashed at a time: what is read and where it goes then fit into a CPU's own cache."""


class Worker:
    """Serves requests one after the other."""

    def __init__(self, table_fd: int) -> None:
        self._table = mmap.mmap(table_fd, 0, prot=mmap.PROT_READ)
        json_end, self._reads_at, self._rows_at = HEAD.unpack_from(self._table, 0)
        table = json.loads(self._table[HEAD.size : json_end])
        self._verify: bool = table["verify"]
        self._files: list[tuple[str, bool]] = table["files"]
        pieces = [memoryview(mmap.mmap(fd, length)) for fd, length in table["pieces"]]
        size = table["slot_bytes"]
        self._slots = [pieces[piece][at : at + size] for piece, at in table["slots"]]
        self._open: dict[int, int] = {}

    def serve(self, requests: int, answers: int) -> None:
        """Until the end of the requests. Both are pipes; records are read and written whole."""
        while raw := os.read(requests, REQUEST.size):
            slot, number = REQUEST.unpack(raw)
            self.read_us = self.hash_us = 0
            try:
                outcome, detail = self._fill(self._slots[slot], number)
            except OSError as error:
                outcome, detail = REFUSED, error.errno or errno.EIO
            answer = ANSWER.pack(slot, number, outcome, detail, self.read_us, self.hash_us)
            os.write(answers, answer)

    def _fill(self, view: memoryview, number: int) -> tuple[int, int]:
        at = self._reads_at + number * READ.size
        file, offset, n_bytes, first, end = READ.unpack_from(self._table, at)
        if not self._verify:
            begun = time.perf_counter_ns()
            whole = self._read(file, offset, n_bytes, view)
            self.read_us = (time.perf_counter_ns() - begun) // 1000
            return (GOOD if whole else CUT_SHORT), 0
        rows = self._table[self._rows_at + first * ROW.size : self._rows_at + end * ROW.size]
        pieces = list(ROW.iter_unpack(rows))
        low, direct = 0, self._files[file][1]
        while low < len(pieces):
            begin, high = pieces[low][0], low + 1
            while high < len(pieces) and (direct or pieces[high][0] - begin < STEP_BYTES):
                high += 1
            stop = pieces[high][0] if high < len(pieces) else n_bytes
            begun = time.perf_counter_ns()
            if not self._read(file, offset + begin, stop - begin, view[begin:]):
                return CUT_SHORT, 0
            read = time.perf_counter_ns()
            for index in range(low, high):
                piece_at, length, digest = pieces[index]
                if blake3(view[piece_at : piece_at + length]).digest() != digest:
                    return DIFFERS, first + index
            self.read_us += (read - begun) // 1000
            self.hash_us += (time.perf_counter_ns() - read) // 1000
            low = high
        return GOOD, 0

    def _descriptor(self, file: int) -> int:
        found = self._open.get(file)
        if found is None:
            if len(self._open) >= 64:
                os.close(self._open.pop(next(iter(self._open))))
            path, direct = self._files[file]
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
            found = self._open[file] = os.open(os.fsencode(path), flags)
        return found

    def _read(self, file: int, offset: int, n_bytes: int, view: memoryview) -> bool:
        """Whether the file has that many bytes. Past the page cache whole pages are read."""
        asked = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES if self._files[file][1] else n_bytes
        descriptor, done = self._descriptor(file), 0
        while done < n_bytes:
            reached = done + os.preadv(descriptor, [view[done:asked]], offset + done)
            if reached < n_bytes:  # go on at a page boundary
                reached -= reached % PAGE_BYTES
                if reached <= done:
                    return False
            done = reached
        return True


if __name__ == "__main__":
    _requests, _answers, _table = map(int, sys.argv[1:4])
    Worker(_table).serve(_requests, _answers)
