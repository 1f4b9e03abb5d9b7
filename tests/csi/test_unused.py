"""References of volumes that nothing uses: what is taken for unused, and what is removed of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csi.claims import RENEW_S, Claim, renew
from csi.names import VolumeNames
from csi.requests import CreateRequest
from csi.stores import Stores
from csi.unused import (
    Listed,
    Use,
    VolumeReference,
    list_volume_references,
    read_objects,
    remove_unused,
)
from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput
from imgfmt.reference import ReferenceRecord, TargetKind
from snapcask.commands import verbs
from tests.csi.test_config import LEAST
from tests.snapcask.conftest import call as call_fixture
from tests.snapcask.support import Outcome
from tests.transfer.fixture_store import FixtureStore, Node, run

DAY_S = 86_400
HOUR_NS = 3600 * 10**9
DRIVER = "csi.snapcask.dev"
call = call_fixture


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A store."""
    made = FixtureStore(tmp_path / "store")
    yield made
    made.close()


def digits(number: int) -> str:
    """Those of a volume."""
    return f"{number:032x}"


def add(
    store: FixtureStore, name: str, image: Digest, age_h: float = 48, driver: str = DRIVER
) -> ReferenceRecord:
    """Make a reference as the driver made it some hours ago."""
    record = ReferenceRecord(
        f"_volumes/{name}", "latest", TargetKind.IMAGE, image, os.urandom(16),
        time.time_ns() - int(age_h * HOUR_NS), Claim("r", "models/a").text(driver),
    )  # fmt: skip
    run(store.store.change_reference(record, None))
    return record


def volume(handle: str, **more: Any) -> dict[str, Any]:
    """A PersistentVolume."""
    csi = {"driver": DRIVER, "volumeHandle": handle}
    return {"kind": "PersistentVolume", "metadata": {"name": "pv"}, "spec": {"csi": csi}, **more}


def objects(*items: dict[str, Any], kind: str = "List", **more: Any) -> bytes:
    """What kubectl prints."""
    return json.dumps({"apiVersion": "v1", "kind": kind, "items": items, **more}).encode()


def listed(*items: dict[str, Any], age_h: float = 0, snapshots: bool = False) -> Listed:
    """A list that was written some hours ago."""
    time_ns = time.time_ns() - int(age_h * HOUR_NS)
    return read_objects(objects(*items), "list", time_ns, snapshots=snapshots)


def found(store: FixtureStore, *lists: Listed, min_age_s: float = DAY_S) -> list[VolumeReference]:
    """What is known of the references."""
    work = list_volume_references(store.catalog, lists, driver=DRIVER, min_age_s=min_age_s)
    return run(work)


def uses(references: Sequence[VolumeReference]) -> dict[str, Use]:
    """Uses by what follows `_volumes/`."""
    return {one.seen.record.name.removeprefix("_volumes/"): one.use for one in references}


def held(store: FixtureStore) -> set[str]:
    """Volume references that are there."""
    states = run(store.store.list_references())
    return {s.record.name for s in states if s.record.target and s.record.name.startswith("_")}


def test_a_reference_is_unused_if_it_is_old_and_no_object_names_it(store: FixtureStore) -> None:
    image = store.add({b"a": Node(b"x")})
    add(store, digits(1), image)
    add(store, digits(2), image)
    add(store, digits(3), image, age_h=1)
    add(store, digits(4), image, driver="csi.other.dev")
    add(store, f"snap-{digits(5)}", image)
    handle = f"vol-main-{digits(1)}"
    assert uses(found(store)) == {
        digits(1): Use.UNKNOWN, digits(2): Use.UNKNOWN, digits(3): Use.UNKNOWN,
        digits(4): Use.OTHER, f"snap-{digits(5)}": Use.UNKNOWN,
    }  # fmt: skip
    known = uses(found(store, listed(volume(handle))))
    assert known == {
        digits(1): Use.USED, digits(2): Use.UNUSED, digits(3): Use.NEW,
        digits(4): Use.OTHER, f"snap-{digits(5)}": Use.UNKNOWN,
    }  # fmt: skip
    assert uses(found(store, listed(), listed(volume(handle)))) == known


def test_snapshots_are_unused_only_by_a_list_that_has_them(store: FixtureStore) -> None:
    image = store.add({b"a": Node(b"x")})
    for number in (1, 2):
        add(store, f"snap-{digits(number)}", image)
    content = {
        "kind": "VolumeSnapshotContent",
        "status": {"snapshotHandle": f"main/_volumes/snap-{digits(1)}"},
    }
    both = {f"snap-{digits(1)}": Use.USED, f"snap-{digits(2)}": Use.UNUSED}
    assert uses(found(store, listed(content, snapshots=True))) == both
    one = {f"snap-{digits(1)}": Use.USED, f"snap-{digits(2)}": Use.UNKNOWN}
    assert uses(found(store, listed(content))) == one
    assert uses(found(store, listed(content, snapshots=True), listed())) == one


def test_a_list_says_nothing_of_what_was_young_when_it_was_written(store: FixtureStore) -> None:
    add(store, digits(1), store.add({b"a": Node(b"x")}), age_h=30)
    assert uses(found(store, listed(age_h=2))) == {digits(1): Use.UNUSED}
    assert uses(found(store, listed(age_h=10))) == {digits(1): Use.NEW}
    assert uses(found(store, listed(), listed(age_h=10))) == {digits(1): Use.NEW}
    with pytest.raises(InvalidInput, match="2h is the least"):
        found(store, listed(), min_age_s=7100)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "is not JSON"),
        (objects()[:-1], "is not JSON"),
        (b"[]", "no list of objects"),
        (json.dumps(volume("vol-main-x")).encode(), "no list of objects"),
        (objects(metadata={"continue": "abc"}), "first part of a list"),
        (objects({"kind": "Pod"}), "has a Pod"),
        (objects({"metadata": {}}, kind="PodList"), "has a Pod"),
        (b'{"kind": "List", "items": [1]}', "no object"),
    ],
)
def test_what_is_no_whole_list_is_refused(raw: bytes, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        read_objects(raw, "list", 0, snapshots=False)


def test_a_list_of_the_api_itself_is_read_too() -> None:
    item = {k: v for k, v in volume(f"vol-main-{digits(7)}").items() if k != "kind"}
    raw = objects(item, kind="PersistentVolumeList", metadata={"resourceVersion": "1"})
    assert read_objects(raw, "list", 0, snapshots=False).digits == {digits(7)}


def test_only_what_is_still_as_it_was_seen_is_removed(store: FixtureStore) -> None:
    image = store.add({b"a": Node(b"x")})
    used, unused, changed = (add(store, digits(n), image) for n in (1, 2, 3))
    references = found(store, listed(volume(f"vol-main-{digits(1)}")))
    run(renew(store.catalog, changed))  # as CreateVolume does when it is called again
    done = uses(run(remove_unused(store.catalog, references, none_in_use=False)))
    assert done == {digits(1): Use.USED, digits(2): Use.REMOVED, digits(3): Use.CHANGED}
    assert held(store) == {used.name, changed.name}
    again = uses(found(store, listed(volume(f"vol-main-{digits(1)}"))))
    assert again == {digits(1): Use.USED, digits(3): Use.NEW}
    assert unused.name not in held(store)


def test_a_list_that_knows_no_volume_removes_nothing_unless_that_is_said(
    store: FixtureStore,
) -> None:
    add(store, digits(1), store.add({b"a": Node(b"x")}))
    references = found(store, listed())
    with pytest.raises(InvalidInput, match="know none of the volumes"):
        run(remove_unused(store.catalog, references, none_in_use=False))
    assert len(held(store)) == 1
    done = run(remove_unused(store.catalog, references, none_in_use=True))
    assert uses(done) == {digits(1): Use.REMOVED}
    assert held(store) == set()


def test_a_damaged_reference_stays_only_if_it_is_in_use(store: FixtureStore) -> None:
    image = store.add({b"a": Node(b"x")})
    for number in (1, 2, 3):
        add(store, digits(number), image, age_h=1)
    for number in (1, 2):
        (path,) = store.root.glob(f"refs/_volumes+{digits(number)}/*/*")
        path.write_bytes(b"rot")
    damaged = {digits(1): Use.DAMAGED, digits(2): Use.DAMAGED, digits(3): Use.UNKNOWN}
    assert uses(found(store)) == damaged
    used = listed(volume(f"vol-main-{digits(1)}"), volume(f"vol-main-{digits(3)}"))
    references = found(store, used)
    assert uses(references) == {
        digits(1): Use.DAMAGED, digits(2): Use.UNUSED, digits(3): Use.USED
    }  # fmt: skip
    run(remove_unused(store.catalog, references, none_in_use=False))
    assert uses(found(store, used)) == {digits(1): Use.DAMAGED, digits(3): Use.USED}


@pytest.mark.parametrize(("age_h", "anew"), [(0.5, False), (2, True)])
def test_create_volume_writes_an_old_reference_anew(
    store: FixtureStore, age_h: float, anew: bool
) -> None:
    from csi.config_file import parse_config
    from tests.csi.pods import tagged

    image = store.add({b"a": Node(b"x")})
    parameters = (("image", tagged(store, "models/a", image)),)
    request = CreateRequest("pvc-1", parameters, 0, 0, None, None)
    config = parse_config(json.dumps({**LEAST, "stores": {"main": {"url": str(store.root)}}}))
    stores = Stores(config)
    names = VolumeNames(config, stores)
    made = run(names.create_volume(request))
    name = f"_volumes/{made.volume_id.rpartition('-')[2]}"
    first = run(store.store.read_reference(name, "latest"))
    assert first is not None
    older = replace(
        first.record, time_ns=time.time_ns() - int(age_h * HOUR_NS), write_id=os.urandom(16)
    )
    run(store.store.change_reference(older, first))
    assert run(names.create_volume(request)) == made
    stores.close()
    again = run(store.store.read_reference(name, "latest"))
    assert again is not None
    assert (again.record.write_id != older.write_id) == anew
    assert (again.record.target, again.record.who) == (image, older.who)
    assert RENEW_S == 3600


def test_the_command_lists_and_removes(store: FixtureStore, call: Any, tmp_path: Path) -> None:
    image = store.add({b"a": Node(b"x")})
    for number in (1, 2):
        add(store, digits(number), image)
    path = tmp_path / "objects.json"
    path.write_bytes(objects(volume(f"vol-main-{digits(1)}")))
    line = ["csi", "volumes", "--store", store.root, "--objects", path]
    told: Outcome = call(*line, "--json")
    assert [one["use"] for one in told.document["volumes"]] == ["used", "unused"]
    assert told.document["volumes"][1]["image"] == "models/a"
    os.utime(path, (time.time() + 3 * 86_400,) * 2)
    told = call(*line, "--prune")
    assert told.code == 2
    assert "is of the future by its modification time; list the objects again" in told.err
    assert len(held(store)) == 2
    os.utime(path)
    told = call(*line, "--prune")
    assert (told.code, told.err) == (0, "")
    assert "removed" in told.out
    assert held(store) == {f"_volumes/{digits(1)}"}
    told = call("csi", "volumes", "--store", store.root, "--prune")
    assert told.code == 2
    assert "--objects" in told.err
    told = call(*line[:-1], tmp_path / "none.json", "--prune")
    assert told.code != 0
    assert "none.json" in told.err


def test_the_driver_itself_still_needs_its_options(call: Any) -> None:
    told: Outcome = call("csi")
    assert told.code == 2
    assert "--endpoint" in told.err
    assert "csi" in verbs.list_commands(None)  # type: ignore[arg-type]
