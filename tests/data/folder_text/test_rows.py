"""Text and instructions become rows of tokens of which exactly what should be is learnt; what can't
be used is refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.data import CorpusError, DataConfig
from pyops.data.folder_text import (
    FolderTokenizer,
    RowBatches,
    RowOptions,
    RowShare,
    TokenRows,
    held_out_batches,
    prepare_rows,
)
from tests.parallel.tiny_folder import CHAT, LETTERS, SPECIAL, make_tokenizer, write_chat

pytestmark = pytest.mark.cpu_only

IDS = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
GENERATION = CHAT.replace(
    "{{ m.content }}{{ eos_token }}",
    "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}",
)
# A template that forgets what an assistant thought once others follow.
FORGETFUL = CHAT.replace("<bot>{{ m.content", "<bot>{% if loop.last %}hm {% endif %}{{ m.content")
LAST = "{{ messages[1].content if messages | length > 1 }}"
TALK = [
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "yes."},
]


def rows_of(
    folder: Path, lines: list[Any] | str, *, chat: str | None = None, length: int = 64, **data: Any
) -> TokenRows:
    """The rows of some lines, or of a text, with a folder beside it."""
    make_tokenizer(folder / "model")
    if chat is not None:
        (folder / "model" / "chat_template.jinja").write_text(chat)
    path = folder / ("text.txt" if isinstance(lines, str) else "rows.jsonl")
    if isinstance(lines, str):
        path.write_text(lines)
    else:
        path.write_bytes(
            b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
        )
    config = DataConfig(path=str(path), cache=str(folder / "cache"), **data)
    options = RowOptions(length, config.long_rows)
    return prepare_rows(config, FolderTokenizer(folder / "model"), options)


def shown(rows: TokenRows, row: int = 0) -> tuple[str, str]:
    """A row's text, and below it the same where it is learnt and _ elsewhere; special tokens are
    capitals: S begins, E ends, P pads, U a user, B the assistant."""
    names = dict(zip(range(6), "SEPUB?", strict=True)) | {IDS[x]: x for x in LETTERS}
    batch = rows.batch([row], length=rows.length(row), pad_token_id=IDS["<pad>"])
    text = "".join(names[i] for i in batch["input_ids"][0].tolist())
    learnt = "".join("_" if i < 0 else names[i] for i in batch["labels"][0].tolist())
    return text, learnt


@pytest.mark.parametrize(
    ("row", "chat", "text", "learnt"),
    [
        (
            {"messages": TALK},
            CHAT,
            "SU1+1=?B2EUso?Byes.E",
            "________2E_____yes.E",
        ),
        (
            {"messages": TALK},
            GENERATION,
            "SU1+1=?B2EUso?Byes.E",
            "________2______yes._",
        ),
        (
            {"prompt": "1+1=", "response": "2"},
            CHAT,
            "SU1+1=B2E",
            "_______2E",
        ),
        (
            {"prompt": "1+1=", "response": "2", "id": 7},
            None,
            "S1+1=2E",
            "_____2E",
        ),
    ],
    ids=["messages", "marked by the template", "prompt by a template", "prompt alone"],
)
def test_what_the_assistant_says_is_learnt_and_nothing_else(tmp_path, row, chat, text, learnt):
    assert shown(rows_of(tmp_path, [row], chat=chat)) == (text, learnt)


def test_text_is_packed_whole_with_an_end_behind_each_file(tmp_path):
    rows = rows_of(tmp_path, "abcdefgh", length=5)
    assert [shown(rows, i) for i in range(len(rows))] == [("Sabcd", "Sabcd"), ("efghE", "efghE")]
    assert rows.num_learnt == 2 * 4
    rest = prepare_rows(
        DataConfig(path=str(tmp_path / "text.txt"), cache=str(tmp_path / "cache")),
        FolderTokenizer(tmp_path / "model"),
        RowOptions(4, keeps_rest=True),
    )
    assert [shown(rest, i)[0] for i in range(len(rest))] == ["Sabc", "defg", "hE"]


def test_a_first_token_is_learnt_from_nothing(tmp_path):
    rows = rows_of(tmp_path, [{"prompt": "", "response": "abc"}], chat=LAST)
    assert shown(rows) == ("abc", "abc")
    assert rows.num_learnt == 2


def test_long_rows_are_cut_where_asked_for(tmp_path):
    lines = [{"prompt": "ab", "response": "cdefg"}, {"prompt": "abcdefg", "response": "h"}]
    rows = rows_of(tmp_path, lines, length=6, long_rows="truncate")
    assert shown(rows) == ("Sabcde", "___cde")
    assert (len(rows), rows.num_truncated, rows.num_left_out, rows.num_learnt) == (1, 2, 1, 3)


def test_any_number_of_ranks_has_the_same_global_batches(tmp_path):
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT)
    config = DataConfig(path=str(write_chat(tmp_path / "c.jsonl", rows=40)), cache=str(tmp_path))
    rows = prepare_rows(config, FolderTokenizer(tmp_path / "model"), RowOptions(64))
    chosen, held_out = rows.split(0.1)
    assert len(chosen) == 36
    assert sorted([*chosen, *held_out]) == list(range(40))

    def batches(ranks: int) -> list[RowBatches]:
        shares = [RowShare(4, 64, 2, rank, ranks) for rank in range(ranks)]
        return [RowBatches(rows, chosen, share, seed=1) for share in shares]

    (whole,), halves = batches(1), batches(2)
    later: list[torch.Tensor] = []
    for step in range(12):  # 9 are an epoch
        if step == 5:
            state = whole.state_dict()
        wanted, parts = whole.next(), [half.next() for half in halves]
        for key, value in wanted.items():
            assert torch.equal(torch.cat([part[key] for part in parts]), value)
        later += [wanted["input_ids"]] if step >= 5 else []
    (resumed,) = batches(1)
    resumed.load_state_dict(state)
    assert all(torch.equal(resumed.next()["input_ids"], each) for each in later)
    held = [list(held_out_batches(rows, held_out, RowShare(3, 64, 2, r, 3))) for r in range(3)]
    assert [[len(batch["labels"]) for batch in rank] for rank in held] == [[1, 1], [1, 0], [1, 0]]


GOOD = {"prompt": "a", "response": "b"}
EMPTY = {"prompt": "a", "response": ""}
ASKED = {"messages": TALK[:1]}


@pytest.mark.parametrize(
    ("lines", "chat", "said"),
    [
        ([GOOD, b"{"], None, r"rows.jsonl:2 is no JSON \(.*\); write one object"),
        ([GOOD, b"", b"\xff"], None, r"rows.jsonl:3 is no JSON"),
        ([3], None, r"rows.jsonl:1 is '3'; write"),
        ([{"prompt": "a", "answer": "b"}], None, r":1 has no 'response', but the keys prompt, an"),
        ([{"response": "b"}], None, r":1 has no 'prompt'"),
        ([{"prompt": "a", "response": 2}], None, r":1 has response = '2'; it must be a text"),
        ([EMPTY], None, r":1 has nothing to learn from: the assistant says nothing"),
        ([{**GOOD, "messages": TALK}], CHAT, r":1 has messages and a prompt or response"),
        ([{"messages": TALK}], None, r":1 has messages, but .*model has no chat template"),
        ([{"messages": []}], CHAT, r":1 has messages = '\[\]'"),
        ([{"messages": ["hi"]}], CHAT, r":1, message 1 is 'hi'"),
        ([{"messages": [{"from": "human"}]}], CHAT, r":1, message 1 has role = None; it must be o"),
        ([{"messages": [{"role": "user"}]}], CHAT, r":1, message 1 has content = 'None'"),
        ([ASKED], CHAT, r":1 has nothing to learn from: no message is the assistant's"),
        ([{"messages": TALK}], FORGETFUL, r":1: the chat template writes message 2 otherwise once"),
        ([GOOD], "{{ raise_exception('no') }}", r":1: the chat template can't write .*: no\)"),
        ([GOOD], "{% if %}", r":1: the chat template can't write these messages"),
        ([{"prompt": "a", "response": "b" * 20}], None, r":1 has 23 tokens, but model.sequence_l"),
        ([], None, r"is empty"),
    ],
)
def test_instructions_that_can_not_be_used_are_named_by_line(tmp_path, lines, chat, said):
    with pytest.raises(CorpusError, match=said):
        rows_of(tmp_path, lines, chat=chat, length=22)


def test_text_that_can_not_be_used_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"nothing to learn from: it fills no row of 64 tokens"):
        rows_of(tmp_path, "abc")
    one = rows_of(tmp_path, "abc", length=5)
    with pytest.raises(CorpusError, match="has 1 row, and one is held out: nothing to learn"):
        one.split(0.1)
    two = rows_of(tmp_path, "abcdefgh", length=5)
    with pytest.raises(CorpusError, match="has 1 row to train on, fewer than a batch of 4"):
        RowBatches(two, two.split(0.1)[0], RowShare(4, 5, 2), seed=0)
    lines = [{"prompt": "abcdefgh", "response": "i"}]
    with pytest.raises(CorpusError, match="all 1 rows were cut before what the assistant says"):
        rows_of(tmp_path, lines, length=4, long_rows="truncate")
    with pytest.raises(CorpusError, match=r"max_bytes is 3, but .*no line is cut; set it to 0"):
        rows_of(tmp_path, lines, max_bytes=3)
    (tmp_path / "rows.jsonl").rename(tmp_path / "cache" / "rows.jsonl")
    with pytest.raises(CorpusError, match=r"files of instructions \(.jsonl\) and \d+ of text"):
        prepare_rows(
            DataConfig(path=str(tmp_path / "cache"), cache=str(tmp_path / "other")),
            FolderTokenizer(tmp_path / "model"),
            RowOptions(8),
        )


def test_a_folder_without_a_tokenizer_that_fits_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(CorpusError, match=r"has no tokenizer.json \(tokenizer.model alone is not"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"tokenizer.json is no tokenizer"):
        FolderTokenizer(tmp_path)
    make_tokenizer(tmp_path)
    FolderTokenizer(tmp_path).check_vocabulary(len(IDS))
    with pytest.raises(CorpusError, match=r"has 50 tokens, but the model has embeddings of 49"):
        FolderTokenizer(tmp_path).check_vocabulary(49)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CorpusError, match=r"tokenizer_config.json is no JSON"):
        FolderTokenizer(tmp_path)


def test_a_cache_that_was_damaged_is_named(tmp_path):
    rows_of(tmp_path, "abcdefgh", length=5)
    next((tmp_path / "cache").glob("*/tokens.bin")).write_bytes(b"123")
    with pytest.raises(CorpusError, match=r"is damaged .*; delete that folder"):
        rows_of(tmp_path, "abcdefgh", length=5)
