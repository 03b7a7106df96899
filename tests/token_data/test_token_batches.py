"""The same global batches on any number of ranks, from any position, each row once in an epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from pyops.data import CorpusError
from pyops.token_data import (
    Prefetched,
    SequenceRows,
    TokenBatches,
    Tokens,
    TokenSource,
    held_out_rows,
    open_tokens,
    packed_rows,
)
from tests.token_data.tiny_tokens import numbered, write

pytestmark = pytest.mark.cpu_only

T = 5


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Tokens]:
    """Two data sets of 19 and 45 rows, whose tokens tell where they are from."""
    folder = tmp_path_factory.mktemp("sets")
    documents = [list(range(1000 + i, 1000 + i + 9)) for i in range(0, 225, 9)]
    write(folder / "b", [*documents, [9]], vocab_size=2000)
    return [open_tokens(numbered(folder / "a", 96)), open_tokens(folder / "b")]


def batches_of(sets: list[Tokens], *, rank: int = 0, num_ranks: int = 1, **options) -> TokenBatches:
    weights, seed = options.pop("weights", [3.0, 1.0]), options.pop("seed", 3)
    sources = [
        TokenSource(
            SequenceRows(each, sequence_length=T), digest=each.digest, weight=weight, **options
        )
        for each, weight in zip(sets, weights, strict=False)
    ]
    return TokenBatches(sources, global_batch=8, seed=seed, rank=rank, num_ranks=num_ranks)


def take(batches, count: int) -> torch.Tensor:
    return torch.stack([batches.next()["tokens_BT"] for _ in range(count)])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(sets, num_ranks):
    whole = take(batches_of(sets), 12)
    parts = [batches_of(sets, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    assert torch.equal(torch.cat([take(each, 12) for each in parts], dim=1), whole)
    assert len({each.position for each in parts}) == 1


def test_targets_are_the_next_tokens(sets):
    batch = batches_of(sets[:1]).next()
    assert torch.equal(batch["targets_BT"], batch["tokens_BT"] + 1)
    assert (batch["tokens_BT"][:, 0] % T == 0).all()


def test_each_row_comes_once_in_an_epoch_and_by_its_weight(sets):
    rows = take(batches_of(sets), 19)[:, :, 0].flatten().tolist()  # 152: 3 of 4 from the first
    first = [row for row in rows if row < 1000]
    assert len(first) == 114
    for epoch in range(6):
        assert sorted(first[19 * epoch : 19 * epoch + 19]) == list(range(0, 95, T))
    assert first[:19] != first[19:38]
    others = Counter(row for row in rows if row >= 1000)
    assert len(others) == 38
    assert set(others.values()) == {1}


@pytest.mark.parametrize("steps", [0, 1, 7, 12])
@pytest.mark.parametrize("depth", [0, 3])
def test_the_cursor_continues_exactly_on_other_ranks_and_through_a_thread(sets, steps, depth):
    whole = take(batches_of(sets), steps + 6)[steps:]
    first = Prefetched(batches_of(sets, rank=1, num_ranks=2), depth=depth)
    for _ in range(steps):
        first.next()
    state = first.state_dict()
    assert state["position"] == 8 * steps
    again = Prefetched(batches_of(sets), depth=depth)
    again.next()
    again.load_state_dict(state)
    assert torch.equal(take(again, 6), whole)
    middle = again.state_dict()
    again.load_state_dict(state)  # three times in one epoch
    take(again, 6)
    assert again.state_dict() == middle
    again.close()
    first.close()


def test_a_cursor_of_another_order_is_refused(sets):
    state = batches_of(sets).state_dict()
    with pytest.raises(CorpusError, match=r"seed 3, but is now at seed 4.*train.seed"):
        batches_of(sets, seed=4).load_state_dict(state)
    with pytest.raises(CorpusError, match=r"weights \[3, 1\].*\[1, 1\].*data.weights"):
        batches_of(sets, weights=[1.0, 1.0]).load_state_dict(state)
    with pytest.raises(CorpusError, match="digests"):
        batches_of(sets[::-1]).load_state_dict(state)
    with pytest.raises(CorpusError, match=r"rows \[19, 45\].*\[17, 41\]"):
        batches_of(sets, held_out=0.1).load_state_dict(state)
    with pytest.raises(CorpusError, match=r'not of data\.kind "tokens"'):
        batches_of(sets).load_state_dict({"digest": "d", "epoch": 0, "position": 3})


def test_what_is_held_out_is_never_trained_on(sets):
    batches = batches_of(sets, held_out=0.2)
    trained = set(take(batches, 30)[:, :, 0].flatten().tolist())
    held = held_out_rows(batches.sources, num_rows=99)["tokens_BT"][:, 0].tolist()
    assert sorted(held) == [75, 80, 85, 90, *range(1180, 1225, T)]
    assert not trained & set(held)
    assert len(trained) == 15 + 36
    parts = [
        held_out_rows(batches.sources, num_rows=7, rank=r, num_ranks=3)["tokens_BT"]
        for r in range(3)
    ]
    assert sorted(torch.cat(parts)[:, 0].tolist()) == [75, 80, 85, 90, 1180, 1195, 1210]
    with pytest.raises(CorpusError, match="none of which is left"):
        batches_of(sets, held_out=0.99)


def test_packed_rows_have_each_document_once_and_are_made_once(sets, tmp_path, monkeypatch):
    monkeypatch.setattr("pyops.token_data.rows.WINDOW", 4)
    rows = packed_rows(sets[1], sequence_length=20, cache=tmp_path)
    batch = rows.batch(range(len(rows)))
    learnt = batch["targets_BT"][batch["targets_BT"] != -100]
    assert sorted(learnt.tolist()) == sorted(
        1000 + i for i in range(225) if i % 9
    )  # all but each document's first
    assert rows.fill > 0.8
    monkeypatch.setattr("pyops.token_data.rows.pack", None)
    again = packed_rows(sets[1], sequence_length=20, cache=tmp_path)
    assert np.array_equal(again.pieces, rows.pieces)
    source = TokenSource(again, digest=sets[1].digest)
    assert TokenBatches([source], global_batch=2, seed=0).next()["documents_BT"].shape == (2, 20)


def test_documents_of_one_token_fill_no_row(tmp_path):
    tokens = open_tokens(write(tmp_path / "t", [[1], [2], []]))
    with pytest.raises(CorpusError, match="no document of two tokens"):
        packed_rows(tokens, sequence_length=4, cache=tmp_path)


def test_a_token_that_is_none_is_named_with_its_place(tmp_path: Path):
    folder = numbered(tmp_path / "t", 96)
    data = np.fromfile(folder / "00001.bin", dtype="<u2")
    data[3] = 65_000
    data.tofile(folder / "00001.bin")
    rows = SequenceRows(open_tokens(folder), sequence_length=T)
    with pytest.raises(CorpusError, match=r"token 65000 \(.*00001\.bin, token 3, document 0\)"):
        rows.batch(range(len(rows)))


def test_too_few_tokens(tmp_path):
    tokens = open_tokens(numbered(tmp_path / "t", 5))
    with pytest.raises(CorpusError, match="5 tokens, fewer than one sequence of 5 and its next"):
        SequenceRows(tokens, sequence_length=5)
    assert len(SequenceRows(tokens, sequence_length=4)) == 1
