"""A manifest that was written to harm is refused by name, before what it names is opened: nothing
outside, nothing huge."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.checkpoint import CheckpointError, Reader, load, save
from pyops.checkpoint.format import manifest
from pyops.checkpoint.format.manifest import seal
from pyops.flat import Shard, Shards

pytestmark = pytest.mark.cpu_only

SHARED, SHARDS, OWN = "shared.safetensors", "shards-00000.safetensors", "own-00000.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
    halves = Shards((Shard((4, 3), (0,), torch.ones(5)), Shard((4, 3), (5,), torch.ones(7))))
    save(
        tmp_path / "c",
        {"a": torch.ones(3), "b": [torch.zeros(2), 7], "e": halves},
        own={"rng": torch.arange(4)},
    )
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "c" / SHARED).read_bytes())
    return tmp_path / "c"


def parts(m: dict[str, Any]) -> list[dict[str, Any]]:
    return m["tree"]["state"]["e"]["$shards"]["parts"]


def rename(name: str, to: str) -> Callable[[dict[str, Any]], None]:
    def change(m: dict[str, Any]) -> None:
        for table in m["files"], m["tensors"]:
            if name in table:
                table[to] = table.pop(name)
        if name == SHARDS:
            for part in parts(m):
                part["file"] = to

    return change


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """put("files", SHARED, "bytes", 7): m["files"][SHARED]["bytes"] = 7"""
    *keys, last, value = path

    def change(m: dict[str, Any]) -> None:
        for key in keys:
            m = m[key]
        m[last] = value

    return change


def part(number: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda m: parts(m)[number].update(changes)


E = ("tree", "state", "e")
STATE = ("tree", "state")
DEEP: Any = {"$tensor": "a"}
for _ in range(300):
    DEEP = [DEEP]

HOSTILE = {
    "a path upwards": (
        rename(SHARDS, "shards-/../../secret.safetensors"),
        "which is no .safetensors file within the folder",
    ),
    "an absolute path": (
        rename(OWN, "/etc/passwd"),
        "'/etc/passwd', which is no .safetensors file",
    ),
    "a path of another system": (rename(SHARDS, "shards-\\..\\x.safetensors"), "within the folder"),
    "a file that is no tensor file": (
        rename(SHARDS, "manifest.json"),
        "'manifest.json', which is no",
    ),
    "a hidden file": (rename(SHARDS, ".safetensors"), "within the folder"),
    "a part from another file": (
        part(0, file=SHARED, name="a"),
        "'shared.safetensors', which is no file of shards",
    ),
    "a part from nowhere": (
        part(0, file="shards-00009.safetensors"),
        "no file of shards that has it",
    ),
    "an absurd shape": (
        put(*E, "$shards", "shape", [1 << 40, 1 << 40]),
        "the shape .*, which no tensor has",
    ),
    "a shape larger than its parts": (
        put(*E, "$shards", "shape", [1 << 20, 3]),
        r"its shards hold 12 of the 3145728 elements",
    ),
    "a negative shape": (put(*E, "$shards", "shape", [-4, -3]), "which no tensor has"),
    "a shape of too many dims": (put(*E, "$shards", "shape", [1] * 65), "which no tensor has"),
    "a shape that is no list": (put(*E, "$shards", "shape", "43"), "which no tensor has"),
    "a shape of fractions": (put(*E, "$shards", "shape", [4.0, 3]), "which no tensor has"),
    "a dtype that is another thing of torch": (
        put(*E, "$shards", "dtype", "load"),
        "the dtype 'load'; there are float64",
    ),
    "another dtype than its parts": (
        put(*E, "$shards", "dtype", "int32"),
        "which in shards-00000.safetensors has shape .* dtype float32",
    ),
    "a dtype that is no text": (put(*E, "$shards", "dtype", ["float32"]), "the dtype "),
    "overlapping parts": (part(1, offset=[4]), "at offset \\[4\\] overlaps|is not within"),
    "a gap between parts": (lambda m: parts(m).pop(), "has a gap"),
    "no parts": (put(*E, "$shards", "parts", []), "has a gap"),
    "a part beyond the end": (part(1, offset=[6]), r"at \[6\], which is not within \[4, 3\]"),
    "a part before the beginning": (part(0, offset=[-1]), "which is not within"),
    "a part at no place": (part(0, offset=[]), "which is not within"),
    "a part of another shape": (
        part(0, shape=[50]),
        r"of a part of shape \[50\], which in .* has shape \[5\]",
    ),
    "a part twice": (lambda m: parts(m).append(dict(parts(m)[0])), "overlaps"),
    "one tensor under many names": (
        put(*STATE, "x", [{"$tensor": "a"}] * 1000),
        "names the tensor 'a' of .* twice",
    ),
    "shards used twice": (
        lambda m: m["tree"]["state"].update(f=m["tree"]["state"]["e"]),
        "of shards-00000.safetensors twice",
    ),
    "a tensor that is nowhere": (
        put(*STATE, "x", {"$tensor": "zz"}),
        "the tensor 'zz', which shared.safetensors does not hold",
    ),
    "a tensor that is no name": (put(*STATE, "x", {"$tensor": ["a"]}), "does not hold"),
    "an own state with shards": (
        lambda m: m["own"].update({"0": m["tree"]["state"]["e"]}),
        "own.0 has shards",
    ),
    "an own state of no rank": (
        put("own", "../0", None),
        "a state of rank '../0', which is no number",
    ),
    "a depth that no state has": (put(*STATE, "x", DEEP), "more than 200 levels deep"),
    "a tuple that is none": (put(*STATE, "x", {"$tuple": 5}), "tuple is 5; it must be a list"),
    "pairs that are none": (put(*STATE, "x", {"$pairs": [5]}), "pairs has 5, which is no pair"),
    "a key that can be none": (
        put(*STATE, "x", {"$pairs": [[[1], 2]]}),
        "which is no pair of a key and a value",
    ),
    "tensors of no file": (put("tensors", "x.safetensors", {}), "which is none of its files"),
    "tensors larger than the file": (put("tensors", SHARED, "a", "shape", [1 << 40]), "which has"),
    "a size that is no number": (put("files", SHARED, "bytes", "many"), "has bytes = 'many'"),
    "a negative size": (put("files", SHARED, "bytes", -1), "has bytes = -1"),
    "an absurd block": (put("files", SHARED, "block", 0), "checksums, of block = 0 bytes"),
    "too few checksums": (put("files", SHARED, "crc32", []), "a crc32 of 0 checksums"),
    "checksums that are none": (
        put("files", SHARED, "crc32", ["x"]),
        "a crc32 of .* that is no number",
    ),
    "no files": (lambda m: m.pop("files"), "it has no files"),
    "files that are a list": (put("files", [1]), "files is .1.; it must be an object"),
    "no tree": (put("tree", 5), "tree is 5; it must be an object"),
    "no own": (put("own", []), "own is ..; it must be an object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest(folder, monkeypatch, name):
    change, message = HOSTILE[name]
    given = json.loads((folder / "manifest.json").read_text())
    del given["crc32"]
    change(given)
    (folder / "manifest.json").write_text(json.dumps(seal(given)))
    monkeypatch.setattr(
        "pyops.checkpoint.loading.TensorFile", lambda *a: pytest.fail(f"{a[0]} was opened")
    )
    into = torch.full((3,), -1.0)
    for options in {}, {"lazy": True}, {"into": {"a": into}}:
        with pytest.raises(
            CheckpointError, match=f"manifest.json is refused: .*({message})"
        ) as caught:
            load(folder, **options)
        assert f"; delete {folder} and use an earlier checkpoint" in str(caught.value)
        assert len(str(caught.value)) < 1500
    assert into.eq(-1).all()


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [at, *(place for key, value in items for place in places(value, (*at, key)))]


def test_a_value_of_another_type_is_named_by_file_and_key(folder):
    """At every place of a manifest that is sealed again. What a state may hold as well is read as
    what it says."""
    sound = json.loads((folder / "manifest.json").read_text())
    del sound["crc32"]
    refused = 0
    for at in places(sound)[1:]:
        for value in (
            None,
            True,
            -1,
            1.5,
            1 << 70,
            "x",
            "\ud800",
            [],
            [None],
            {},
            {"x": {}},
            {"$tensor": 1},
            {"$pairs": [["a"]]},
        ):
            given = json.loads(json.dumps(sound))
            put(*at, value)(given)
            (folder / "manifest.json").write_text(json.dumps(seal(given)))
            try:
                state, own = load(folder)
            except CheckpointError as error:
                refused += 1
                text = str(error)
                assert "manifest.json" in text, (at, value, text)
                assert any(str(key) in text for key in at), (at, value, text)
            else:
                assert at[0] in ("tree", "own"), f"{at} is not read"
                rest = [
                    t
                    for t in (state, own, *(state.values() if isinstance(state, dict) else ()))
                    if isinstance(t, torch.Tensor)
                ]
                assert all(len(t) in (2, 3, 4) for t in rest), (at, value)
    assert refused > 300


def test_what_is_refused_is_sound_without_the_change(folder):
    given = json.loads((folder / "manifest.json").read_text())
    del given["crc32"]
    (folder / "manifest.json").write_text(json.dumps(seal(given)))
    state, own = load(folder)
    assert torch.equal(state["e"], torch.ones(4, 3))
    assert torch.equal(own["rng"], torch.arange(4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":' * 100000, "is damaged"),
        ('{"format": "pyops.checkpoint", "version": 1' + "0" * 5000 + "}", "is damaged"),
        ("\x00\xff", "is damaged"),
        ('{"format": "pyops.checkpoint", "version": [3]}', r"of version \[3\]"),
        ('{"format": "pyops.checkpoint", "version": 3}', "checksum differs"),
    ],
)
def test_json_that_is_no_manifest(folder, text, message):
    (folder / "manifest.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=f"manifest.json .*{message}"):
        load(folder)


def test_a_manifest_that_is_too_large_is_not_read(folder, monkeypatch):
    with open(folder / "manifest.json", "ab") as file:
        file.truncate((256 << 20) + 1)  # a hole: it takes no room on the disk
    monkeypatch.setattr(manifest.json, "loads", lambda text: pytest.fail("it was read"))
    with pytest.raises(
        CheckpointError, match=r"manifest.json has 268435457 bytes, a manifest at most 268435456"
    ):
        load(folder)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest.json"):
        load(folder)


def test_a_link_out_of_the_folder(folder):
    """Also one to a file of the right size and contents: what is outside may change, or be
    another's."""
    (folder / SHARED).rename(folder.parent / "elsewhere.safetensors")
    (folder / SHARED).symlink_to(folder.parent / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"shared.safetensors leads out of the folder"):
        load(folder)


@pytest.mark.parametrize("name", [SHARED, SHARDS, OWN])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_file_that_is_gone_or_cut_is_named_at_once(folder, name, lazy):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-4])
    with pytest.raises(
        CheckpointError, match=rf"{name} has {len(data) - 4} bytes, {len(data)} by the manifest"
    ):
        load(folder, lazy=lazy)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} can't be read: No such file"):
        load(folder, lazy=lazy)


def test_a_file_that_holds_other_tensors(folder):
    """Sound in itself and of the right size, with checksums to match: the manifest's list does
    not."""
    data = (folder / SHARED).read_bytes().replace(b'"a"', b'"z"')
    (folder / SHARED).write_bytes(data)
    given = json.loads((folder / "manifest.json").read_text())
    del given["crc32"]
    given["files"][SHARED]["crc32"] = [zlib.crc32(data)]
    (folder / "manifest.json").write_text(json.dumps(seal(given)))
    with pytest.raises(
        CheckpointError,
        match=r"shared.safetensors does not hold the tensors that the manifest lists",
    ):
        load(folder)


def refuse_alike(rank: int, group: Any, path: str) -> list[str]:
    """Damage that only one rank can see, because only it looks there: every rank is told."""
    told = []
    for options in {"lazy": True}, {}:
        try:
            load(path, group=group, **options)
        except CheckpointError as error:
            told.append(str(error))
    return told


def test_all_ranks_refuse_alike(world, folder):
    (folder / SHARDS).unlink()
    first, second = world(2).run(refuse_alike, str(folder))
    assert first == second
    assert len(first) == 2
    assert all("shards-00000.safetensors can't be read: No such file" in text for text in first)


def test_a_reader_of_one_process(folder):
    reader = Reader(folder)
    assert reader.state()["b"][1] == 7
    assert reader.own(0)["rng"].read().tolist() == [0, 1, 2, 3]
    assert reader.own(5) is None
