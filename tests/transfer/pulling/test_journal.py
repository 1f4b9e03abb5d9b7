"""A journal is believed as far as it fits, and no further."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from imgfmt.digest import Digest
from transfer.pulling.journal import JournalReader, begin_journal, read_journal

TREE = Digest(bytes(range(32)))
SESSION = b"a session of 16b"


def none_done(n_chunks: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Nothing is done."""
    return np.zeros(n_chunks, np.bool_)


def numbers(*items: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Chunk numbers."""
    return np.array(items, np.int64)


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    journal = begin_journal(path, TREE, none_done(20), SESSION)
    journal.append(numbers(3, 4, 5, 9))
    journal.append(numbers(19, 0))
    found = read_journal(path, TREE, 20)
    assert found is not None
    assert np.flatnonzero(found.done).tolist() == [0, 3, 4, 5, 9, 19]
    assert found.session == SESSION
    journal.close()


def test_a_journal_that_is_begun_anew_keeps_what_is_done(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    done = none_done(8)
    done[2:5] = True
    journal = begin_journal(path, TREE, done, SESSION)
    journal.append(numbers(7))
    journal.close()
    found = read_journal(path, TREE, 8)
    assert found is not None
    assert np.flatnonzero(found.done).tolist() == [2, 3, 4, 7]


@pytest.mark.parametrize("seed", range(30))
def test_a_journal_that_is_cut_or_changed_anywhere_tells_nothing_that_was_not_appended(
    tmp_path: Path, seed: int
) -> None:
    path, chance = tmp_path / "j", random.Random(seed)
    journal = begin_journal(str(path), TREE, none_done(1000), SESSION)
    appended = [sorted(chance.sample(range(1000), 5)) for _ in range(10)]
    for some in appended:
        journal.append(numbers(*some))
    journal.close()
    raw = bytearray(path.read_bytes())
    if seed % 2:
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    else:
        del raw[chance.randrange(len(raw)) :]
    path.write_bytes(raw)
    found = read_journal(str(path), TREE, 1000)
    known = set(np.flatnonzero(found.done).tolist()) if found else set()
    assert known < {number for some in appended for number in some}


def test_records_of_another_place_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = begin_journal(str(path), TREE, none_done(10), SESSION)
    journal.append(numbers(1))
    journal.append(numbers(5))
    journal.close()
    raw = path.read_bytes()
    path.write_bytes(raw[:-24] + raw[-12:])
    found = read_journal(str(path), TREE, 10)
    assert found is not None
    assert not found.done.any()


@pytest.mark.parametrize(("tree", "n_chunks"), [(Digest(bytes(32)), 10), (TREE, 11)])
def test_a_journal_of_another_tree_is_none(tmp_path: Path, tree: Digest, n_chunks: int) -> None:
    path = str(tmp_path / "j")
    begin_journal(path, TREE, none_done(10), SESSION).close()
    assert read_journal(path, tree, n_chunks) is None
    assert read_journal(str(tmp_path / "none"), TREE, 10) is None


def test_a_reader_follows_a_journal_and_notices_another_in_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    reader = JournalReader(path, TREE, 10)
    assert not reader.refresh()
    journal = begin_journal(path, TREE, none_done(10), SESSION)
    for number in (3, 7):
        journal.append(numbers(number))
        assert reader.refresh()
        assert reader.done[number]
    done = none_done(10)
    done[1] = True
    begin_journal(path, TREE, done, SESSION).close()
    journal.close()
    assert reader.refresh()
    assert np.flatnonzero(reader.done).tolist() == [1]
