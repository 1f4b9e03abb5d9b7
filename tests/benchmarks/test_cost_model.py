"""The cost model says what SPEC.md says, and its simulations agree with what can be computed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.cost_model import Fleet, Prices, Rates, main, model, simulate_folders
from benchmarks.cost_model import simulate_private_pages as simulate
from tests.spec.vectors import cost

MODEL = model(Fleet(), Rates(), Prices())


def spec_row(data: str) -> list[float]:
    row = next(line for line in cost() if line.startswith(f"{data} |"))
    return [float(cell.replace(",", "")) for cell in row.split("|")[1:]]


def test_the_format_costs_what_the_specification_says() -> None:
    chunks, packs, trees, tables, _, index, *_ = spec_row("1 PB")
    one = model(replace(Fleet(), n_replicas=1000), Rates(), Prices())  # images of 1 TB: 1 PB
    found = [one.chunks, one.packs, one.tree_bytes / 1e6, one.table_bytes / 1e6]
    assert [*found, one.index_bytes / 1e6] == pytest.approx(
        [chunks, packs, trees, tables, index], rel=0.002
    )
    pushes, pulls = spec_row("1 TB")[-2:]
    assert [one.push_requests, one.pull_requests] == pytest.approx([pushes, pulls], rel=0.002)


def test_what_grows_with_unique_data_and_what_with_replicas() -> None:
    twice = model(replace(Fleet(), unique_tb=2000), Rates(), Prices())
    assert twice.index_bytes == pytest.approx(2 * MODEL.index_bytes)
    assert twice.tree_bytes == MODEL.tree_bytes
    more = model(replace(Fleet(), n_replicas=20_000), Rates(), Prices())
    assert more.tree_bytes == pytest.approx(2 * MODEL.tree_bytes)
    assert more.index_bytes == MODEL.index_bytes


def test_a_cache_shortens_the_time_by_what_it_has() -> None:
    assert MODEL.ready_alone_cached_s == pytest.approx(0.1 * MODEL.ready_alone_s)
    few = model(replace(Fleet(), n_nodes=2), Rates(), Prices())
    assert few.ready_all_at_once_s == few.ready_alone_s


def test_requests_spread_over_the_folders() -> None:
    spread = simulate_folders(n_packs=7000, n_nodes=256_000, n_images=2)
    assert 1 < spread.one_image < 2.2  # many requests: only the packs are uneven
    assert simulate_folders(7000, 100, 2).one_image > spread.one_image


def test_long_runs_of_private_pages_cost_themselves_and_single_ones_a_chunk_each() -> None:
    lengths = [min(15 + n, 256) for n in range(1, 2000)]
    odds = [(63 / 64) ** n for n in range(1999)]  # the longer a chunk, the likelier it is hit
    pages = sum(o * n * n for o, n in zip(odds, lengths, strict=True))
    expected = pages / sum(o * n for o, n in zip(odds, lengths, strict=True))
    assert simulate(0.0001, 1) == pytest.approx(expected, rel=0.1)
    assert simulate(0.0005, 4096) == pytest.approx(1, abs=0.1)


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--unique-tb", "1"])
    assert re.search(r"^index +0\.1 GB$", capsys.readouterr().out, re.MULTILINE)
