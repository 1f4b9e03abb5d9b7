"""The recorder of a push: columns in the order of arrival become those of a tree."""

from __future__ import annotations

import pytest

from imgfmt.chunking import Cuts, PageRun
from imgfmt.errors import Internal
from transfer.pushing.contents import ContentRecorder, Place


def chunks(*pages: int) -> Cuts:
    """Chunks of so many pages, one after the other."""
    starts = [sum(pages[:i]) for i in range(len(pages))]
    return Cuts([PageRun(start, n) for start, n in zip(starts, pages, strict=True)], [])


def place(recorder: ContentRecorder, entry: int, number: int) -> None:
    at = Place(number, 10 * number, 100 * number, number % 2)
    recorder.place(entry, [bytes([number]) * 32], [at])


def test_files_that_arrive_in_another_order_lie_in_the_order_of_the_tree() -> None:
    recorder = ContentRecorder()
    recorder.add(7, chunks(3, 4))
    recorder.close(7)
    recorder.add(2, Cuts([PageRun(0, 5)], [PageRun(5, 9)]))
    recorder.close(2)
    for number, entry in enumerate((7, 7, 2), start=1):
        place(recorder, entry, number)
    contents, places = recorder.finish()
    assert list(contents) == [2, 7]
    assert places.digest[:, 0].tolist() == places.pack.tolist() == [3, 1, 2]
    assert places.offset.tolist() == [30, 10, 20]
    assert places.stored_bytes.tolist() == [300, 100, 200]
    assert places.codec.tolist() == [1, 1, 0]
    assert contents[2].chunk_pages.tolist() == [5]
    assert contents[7].chunk_pages.tolist() == [3, 4]
    assert contents[7].chunk_digest[:, 0].tolist() == [1, 2]
    assert contents[2].extent_hole_pages.tolist() == [9]
    assert contents[7].extent_chunks.tolist() == [2]


def test_digests_are_held_once() -> None:
    recorder = ContentRecorder()
    recorder.add(1, chunks(1))
    place(recorder, 1, 9)
    contents, places = recorder.finish()
    assert contents[1].chunk_digest.base is places.digest


def test_a_finished_recorder_is_empty() -> None:
    recorder = ContentRecorder()
    recorder.add(1, chunks(1))
    place(recorder, 1, 9)
    recorder.finish()
    contents, places = recorder.finish()
    assert (contents, len(places.digest), len(places.codec)) == ({}, 0, 0)


def test_a_file_of_one_hole_has_an_extent_and_no_chunk() -> None:
    recorder = ContentRecorder()
    recorder.add(1, Cuts([], [PageRun(0, 40)]))
    recorder.close(1)
    contents, places = recorder.finish()
    assert contents[1].extent_chunks.tolist() == [0]
    assert contents[1].extent_hole_pages.tolist() == [40]
    assert len(places.digest) == 0


def test_chunks_of_two_files_never_mix() -> None:
    recorder = ContentRecorder()
    recorder.add(1, chunks(1))
    recorder.add(2, chunks(1))
    with pytest.raises(Internal, match="entry 1 came after"):
        recorder.add(1, chunks(1))


def test_chunks_are_placed_in_the_order_in_which_they_were_added() -> None:
    recorder = ContentRecorder()
    recorder.add(1, chunks(1, 1))
    recorder.add(2, chunks(1))
    place(recorder, 1, 1)
    with pytest.raises(Internal, match="entry 2 was placed before"):
        place(recorder, 2, 2)
