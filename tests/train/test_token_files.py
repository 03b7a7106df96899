"""[data] kind = "tokens" and "python": the same losses on any ranks and after any stop, and what
does not go together."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyops.config import Config, ConfigError, load_config
from pyops.config.task_config import TaskConfig
from pyops.data import CorpusError, DataConfig
from pyops.models import GPT
from pyops.token_data import (
    PrepareOptions,
    SequenceRows,
    ShardWriter,
    TokenBatches,
    TokenKind,
    TokenSource,
    prepare_tokens,
)
from pyops.token_data import open_tokens as opened
from pyops.train import train
from tests.parallel.tiny_folder import make_tokenizer
from tests.train.pretrained.test_folder_training import make_config
from tests.train.tiny_run import config_of, losses, same, train_on_rank

pytestmark = pytest.mark.cpu_only

STEPS = 4


def write(folder: Path, *, seed: int, vocab_size: int = 256, tokenizer: str = "") -> str:
    """Documents of 3 to 40 tokens."""
    draw = np.random.default_rng(seed)
    with ShardWriter(folder, TokenKind(vocab_size, tokenizer), shard_tokens=700) as writer:
        for _ in range(120):
            writer.add(draw.integers(0, 40, size=draw.integers(3, 41)))
    return str(folder)


def tokens_run(folder: Path, name: str, *, num_steps: int = STEPS, **data: Any) -> Config:
    paths = [str(folder / each) for each in ("a", "b")]
    for seed, path in enumerate(paths):
        if not Path(path).exists():
            write(Path(path), seed=seed)
    given = {"paths": tuple(paths), "weights": (3.0, 1.0), "cache": str(folder / "cache"), **data}
    plain = config_of(folder, "cpu", name=name, num_steps=num_steps)
    return dataclasses.replace(plain, data=DataConfig(kind="tokens", **given))


def test_losses_are_those_of_the_mixture(tmp_path):
    config = tokens_run(tmp_path, "run")
    train(config)
    sources = []
    for path, weight in zip(config.data.paths, (3, 1), strict=True):
        tokens = opened(path)
        rows = SequenceRows(tokens, sequence_length=16)
        sources.append(TokenSource(rows, digest=tokens.digest, weight=weight, held_out=0.1))
    batch = TokenBatches(sources, global_batch=8, seed=config.train.seed).next()
    model = GPT(config.model, seed=config.train.seed)
    with torch.no_grad():
        wanted = model.loss(batch["tokens_BT"], batch["targets_BT"], reduction="sum") / 128
    assert losses(config)[0] == pytest.approx(float(wanted), rel=1e-5)
    sample = (config.folder / "sample.txt").read_text()
    assert re.fullmatch(r"[\d ]+", sample), "without a tokenizer, tokens are shown as numbers"


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_a_run_of_two_ranks_that_was_stopped_has_the_losses_of_one(world, tmp_path, packing):
    whole = tokens_run(tmp_path, "whole", packing=packing)
    train(whole)
    half = tokens_run(tmp_path, "half", packing=packing, num_steps=2, prefetch=0)
    assert [str(each) for each in world(2).run(train_on_rank, half) if isinstance(each, str)] == []
    train(tokens_run(tmp_path, "half", packing=packing), resume=True)
    assert same(losses(whole), losses(half)[:2] + losses(half)[2:])
    assert len(losses(half)) == STEPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed"),
        ({"weights": (1.0, 1.0)}, r"weights \[3, 1\].*the same data.weights"),
        ({"validation_fraction": 0.3}, "data.validation_fraction"),
    ],
)
def test_a_run_does_not_go_on_with_other_data(tmp_path, change, message):
    train(tokens_run(tmp_path, "run", num_steps=1))
    seed = change.pop("seed", 0)
    config = tokens_run(tmp_path, "run", num_steps=2, **change)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    with pytest.raises((ConfigError, CorpusError), match=message):
        train(config, resume=True)


def test_a_run_does_not_go_on_with_another_kind_of_data(tmp_path):
    train(tokens_run(tmp_path, "run", num_steps=1))
    with pytest.raises(CorpusError, match=r"was of another data\.kind"):
        train(config_of(tmp_path, "cpu", num_steps=2), resume=True)
    train(config_of(tmp_path, "cpu", name="text", num_steps=1))
    with pytest.raises(CorpusError, match=r'was not of data\.kind "tokens"'):
        train(tokens_run(tmp_path, "text", num_steps=2), resume=True)


def test_tokens_of_another_tokenizer_or_vocabulary(tmp_path):
    write(tmp_path / "x", seed=0, tokenizer='{"model": 1}')
    write(tmp_path / "y", seed=0, tokenizer='{"model": 2}')
    paths = (str(tmp_path / "x"), str(tmp_path / "y"))
    with pytest.raises(CorpusError, match=r"tokens of two tokenizers: .*x was written with"):
        train(tokens_run(tmp_path, "run", paths=paths))
    paths = (write(tmp_path / "z", seed=0, vocab_size=300),)
    with pytest.raises(CorpusError, match=r"vocabulary of 300, but model.vocab_size is 256; set"):
        train(tokens_run(tmp_path, "run", paths=paths, weights=()))
    np.full(400, 256, dtype="<u2").tofile(tmp_path / "raw.u16")
    with pytest.raises(CorpusError, match=r"token 256 \(.*raw\.u16, token \d+\) is not in"):
        train(tokens_run(tmp_path, "run", paths=(str(tmp_path / "raw.u16"),), weights=()))


PLAIN = """
import torch

class Rows:
    def __init__(self, first, batch, step):
        self.place, self.first, self.batch, self.step = 0, first, batch, step
    def __iter__(self):
        while True:
            rows = torch.arange(self.batch)[:, None] + torch.arange(17) + self.first
            self.place += 1
            yield (rows + self.step * (self.place - 1)) % 256
    {state}

def make(*, split, sequence_length, batch, rank, num_ranks, seed):
    assert sequence_length == 16
    return Rows(rank * batch + 100 * (split == "validation"), batch, batch * num_ranks)
"""
STATE = """
    def state_dict(self):
        return {"place": self.place}
    def load_state_dict(self, state):
        self.place = state["place"]
"""


@pytest.mark.parametrize("state", ["", STATE])
def test_an_iterable_of_the_users_goes_on_where_it_was(tmp_path, state):
    if state:
        (tmp_path / "mine.py").write_text(PLAIN.replace("    {state}", state))
    else:  # made anew by each __iter__
        text = PLAIN.replace("    {state}", "").replace(
            "while True:", "self.place = 0\n        while True:"
        )
        (tmp_path / "mine.py").write_text(text)

    def run(name: str, num_steps: int) -> Config:
        plain = config_of(tmp_path, "cpu", name=name, num_steps=num_steps)
        path = f"{tmp_path / 'mine.py'}:make"
        return dataclasses.replace(plain, data=DataConfig(kind="python", path=path))

    train(run("whole", STEPS))
    train(run("half", 2))
    train(run("half", STEPS), resume=True)
    assert losses(run("half", STEPS)) == losses(run("whole", STEPS))


def test_functions_that_are_none(tmp_path):
    plain = config_of(tmp_path, "cpu")
    (tmp_path / "m.py").write_text("make = 3\n")
    for path, message in (
        (f"{tmp_path / 'none.py'}:make", "can't be imported"),
        ("no_such_module:make", "can't be imported"),
        (f"{tmp_path / 'm.py'}:make", "has no function 'make'"),
    ):
        data = DataConfig(kind="python", path=path)
        with pytest.raises(CorpusError, match=message):
            train(dataclasses.replace(plain, data=data))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "other"}, "kind is 'other'; choose one of text, tokens, python"),
        ({"kind": "tokens"}, r"paths is \[\], and kind is 'tokens'"),
        ({"paths": ("a",)}, r"paths is \['a'\], and kind is 'text'"),
        ({"kind": "tokens", "paths": ("a",), "weights": (1.0, 2.0)}, "weights has 2 numbers"),
        ({"kind": "tokens", "paths": ("a",), "weights": (0.0,)}, "weights has 0.0; give numbers"),
        ({"kind": "python", "path": "a.py"}, "path is 'a.py' and packing 'none'"),
        ({"prefetch": -1}, "prefetch is -1"),
    ],
)
def test_values_that_do_not_go_together(values, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)


def test_tokens_are_for_a_gpt(tmp_path):
    config = tokens_run(tmp_path, "run")
    with pytest.raises(ValueError, match=r"data\.kind is 'tokens'; a run over text takes it"):
        dataclasses.replace(config, task=TaskConfig(kind="passages"))


def test_a_folder_is_trained_on_tokens_of_its_own_tokenizer_alone(tmp_path):
    config = make_config(tmp_path, "folder")
    folder = Path(config.model_folder.folder)
    options = PrepareOptions(str(folder), workers=1)
    prepare_tokens([str(tmp_path / "t.txt")], tmp_path / "own", options)

    def run(name: str, num_steps: int, path: str) -> Config:
        steps = dataclasses.replace(config.train, num_steps=num_steps)
        data = DataConfig(kind="tokens", paths=(str(tmp_path / path),))
        return dataclasses.replace(config, name=name, train=steps, data=data)

    train(run("whole", STEPS, "own"))
    train(run("half", 2, "own"))
    train(run("half", STEPS, "own"), resume=True)
    half, whole = run("half", STEPS, "own"), run("whole", STEPS, "own")
    assert losses(half) == losses(whole)
    assert (half.folder / "model" / "config.json").exists()
    make_tokenizer(tmp_path / "longer", more=1)
    prepare_tokens(
        [str(tmp_path / "t.txt")],
        tmp_path / "x",
        PrepareOptions(str(tmp_path / "longer"), workers=1),
    )
    with pytest.raises(
        CorpusError, match=r"vocabulary of 51.*or write the tokens with the model's"
    ):
        train(run("x", 1, "x"))
    write(tmp_path / "y", seed=0, vocab_size=40, tokenizer='{"model": 1}')
    with pytest.raises(
        CorpusError, match=r"y has tokens of another tokenizer \(\w+\) than .*llama"
    ):
        train(run("y", 1, "y"))


def test_weights_are_read_from_a_file(tmp_path):
    path = tmp_path / "c.toml"
    lines = 'name = "a"\n[data]\nkind = "tokens"\npaths = ["x", "y"]\nweights = '
    path.write_text(lines + "[0.7, 3]")
    assert load_config(path).data.weights == (0.7, 3.0)
    path.write_text(lines + '["a", 3]')
    with pytest.raises(ConfigError, match=r"data.weights is .*; it must be a list of numbers"):
        load_config(path)
