"""Pictures of patterns: each block is drawn once, in the colour of what it is."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.ops.attention.attention_pictures import FOLDER, draw_all, table
from pyops.attention import BigBird, BlockLayout, Dense, Fixed, draw
from pyops.attention.picture import CELL, EMPTY, FULL, GAP, PARTIAL, TOP
from tests.attention.block_sets import blocks_of
from tests.workers import ROOT

pytestmark = pytest.mark.cpu_only

RUN = re.compile(r"M(\d+) (\d+)h(\d+)v\d+h-\d+z")


def drawn(path: Path, num_blocks: int) -> dict[str, dict[tuple[int, int, int], int]]:
    """{colour: {(head, row, column): times}} of an svg."""
    found: dict[str, dict[tuple[int, int, int], int]] = {EMPTY: {}, PARTIAL: {}, FULL: {}}
    for element in ET.parse(path).getroot():
        if "fill" not in element.attrib or not element.tag.endswith("path"):
            continue
        for x, y, width in RUN.findall(element.attrib["d"]):
            head, left = divmod(int(x) - GAP, num_blocks * CELL + GAP)
            for column in range(left // CELL, (left + int(width)) // CELL):
                key = (head, (int(y) - TOP) // CELL, column)
                cells = found[element.attrib["fill"]]
                cells[key] = cells.get(key, 0) + 1
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_each_block_is_drawn_once(tmp_path: Path, causal: bool):
    pattern = Fixed(num_different_global_patterns=2)
    path = pattern.draw(tmp_path / "deep" / "fixed.svg", num_blocks=9, heads=2, causal=causal)
    layout: BlockLayout = pattern.layout(9 * 16, heads=2, block=16, causal=causal)
    table = layout.dense()
    cells = drawn(path, 9)
    assert {times for own in cells.values() for times in own.values()} == {1}
    assert sum(len(own) for own in cells.values()) == 2 * 81
    assert set(cells[FULL]) | set(cells[PARTIAL]) == {tuple(at) for at in table.nonzero().tolist()}
    on_diagonal = {(head, i, i) for head in range(2) for i in range(9)}
    assert set(cells[PARTIAL]) == (on_diagonal if causal else set())


def test_a_picture_is_small_and_always_the_same(tmp_path: Path):
    paths = [BigBird(2).draw(tmp_path / f"{n}.svg", num_blocks=32) for n in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].stat().st_size < 16000
    blocks = blocks_of(BigBird(2), 0, 32, causal=False)
    assert ET.parse(paths[0]).getroot()[1].text == f"BigBird {len(blocks) / 1024:.1%}"


def test_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape("give it the ending .svg")):
        Dense().draw(tmp_path / "dense.png")
    with pytest.raises(ValueError, match="129 x 129 blocks are too many for one picture"):
        draw(Dense().layout(129 * 16, heads=1, block=16), tmp_path / "dense.svg")
    assert not list(tmp_path.iterdir())


def test_the_pictures_of_the_page_are_those_of_the_command(tmp_path: Path):
    made = draw_all(tmp_path)
    assert len(made) == 6
    # The folder also holds longest.png, which is drawn from rows of benches.
    assert {path.name for path in made} == {path.name for path in FOLDER.glob("*.svg")}
    for path in made:
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name


def test_the_table_of_the_page_is_that_of_the_command():
    assert table() in (ROOT / "docs" / "attention.md").read_text()
