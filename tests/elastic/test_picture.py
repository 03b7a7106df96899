"""The picture of a run: what is drawn follows from the rows, and it is a picture."""

from __future__ import annotations

import sys

import pytest

from pyops.elastic import plot_elastic
from pyops.elastic.picture import LayoutSpan, places, stretches

pytestmark = pytest.mark.cpu_only


def rows_of(*epochs: tuple[int, int, int], steps: int = 2, **more) -> list[dict]:
    """Epochs of so many steps, each with (frozen, stages, replicas)."""
    return [
        {
            "step": steps * epoch + i,
            "epoch": epoch,
            "loss": 1.0,
            "frozen": frozen,
            "stages": stages,
            "replicas": replicas,
            "samples_per_s": 100.0 * (epoch + 1),
            "cached": epoch > 1,
            **more,
        }
        for epoch, (frozen, stages, replicas) in enumerate(epochs)
        for i in range(steps)
    ]


def test_an_epoch_is_as_wide_as_any_other():
    rows = rows_of((0, 2, 1), (3, 2, 1), steps=4)
    assert places(rows) == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    # the last one has just begun, a resumed run begins anywhere, and epochs need not have as many
    # steps
    assert places(rows[:5]) == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert places([{"epoch": 7}, {"epoch": 7}, {"epoch": 8}]) == [7.5, 8.0, 8.5]
    assert places([{"epoch": e} for e in (0, 0, 0, 0, 1, 1, 2)]) == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.5,
        2.0,
        2.25,
    ]
    assert places([]) == []


def test_layouts_in_their_order():
    rows = rows_of((0, 4, 1), (3, 4, 1), (3, 4, 1), (5, 2, 2))
    rows[1]["transition_s"] = 0.5  # at the end of the epoch before
    rows[6]["transition_s"] = 0.25  # or in the first step after
    assert stretches(rows) == [
        LayoutSpan(0.0, 1.0, 0, 4, 1),
        LayoutSpan(1.0, 3.0, 3, 4, 1, 0.5),
        LayoutSpan(3.0, 4.0, 5, 2, 2, 0.25),
    ]
    assert stretches(rows[2:3]) == [LayoutSpan(1.0, 2.0, 3, 4, 1)]
    assert stretches([]) == []


def test_a_change_in_the_middle_of_an_epoch():
    rows = rows_of((0, 4, 1), steps=4)
    rows[3] |= {"frozen": 2}
    assert [(part.begin, part.end, part.frozen) for part in stretches(rows)] == [
        (0.0, 0.75, 0),
        (0.75, 1.0, 2),
    ]


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(
            (0, 4, 1),
            (3, 4, 1),
            (5, 2, 2),
            (6, 2, 1),
            (9, 1, 4),
            transition_s=0.1,
            validation_accuracy=0.5,
        ),
        rows_of((0, 1, 1), steps=1, validation_loss=2.0),
        rows_of((0, 16, 1), samples_per_s=None),
        [{"step": 0, "loss": 1.0}, *rows_of((0, 2, 2), (3, 1, 4))],
        [
            {**row, "samples_per_s": 10.0 ** row["epoch"]}
            for row in rows_of((0, 2, 2), (3, 1, 4), (4, 1, 4))
        ],
    ],
    ids=["run", "one step", "no rates", "other rows", "fast"],
)
def test_a_picture(tmp_path, rows):
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    assert plot_elastic(tmp_path / "run.png", rows, ranks=4, title="a run")
    content = (tmp_path / "run.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_each_rank_is_drawn_as_what_it_is(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    assert plot_elastic(
        tmp_path / "run.svg",
        rows_of((0, 2, 1), (5, 1, 2), transition_s=0.25),
        ranks=3,
        title="a run",
    )
    drawn = (tmp_path / "run.svg").read_text()
    comments = [
        line.strip()[5:-4] for line in drawn.splitlines() if line.strip().startswith("<!--")
    ]
    assert [text for text in comments if text.startswith(("replica", "idle"))] == [
        "replica 0, stage 0",
        "replica 0, stage 1",
        "idle",
        "replica 0",
        "replica 1",
        "idle",
    ]
    assert "0.25 s" in comments


def test_nothing_to_draw(tmp_path, monkeypatch):
    assert not plot_elastic(tmp_path / "run.png", [], ranks=4, title="a run")
    assert not plot_elastic(
        tmp_path / "run.png",
        [{"step": 0, "loss": 1.0, "tokens_per_s": 2.0}],
        ranks=4,
        title="a run",
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot_elastic(tmp_path / "run.png", rows_of((0, 4, 1)), ranks=4, title="a run")
    assert not (tmp_path / "run.png").exists()
