"""[data] packing = "documents": the losses of documents one by one, on every layout of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.config import Config, ConfigError, ParallelConfig, ZeroConfig
from pyops.config.task_config import TaskConfig
from pyops.data import CorpusError, DataConfig, PackedBatches, packed_validation_rows, prepare
from pyops.models import GPT
from pyops.train import train
from pyops.train.report.metrics import read_rows
from pyops.train.setup.recipe import make_mesh
from pyops.train.setup.text_data import TextData
from tests.grids import full
from tests.train.tiny_run import config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only

STEPS = 3


def packed(folder: Path, name: str, **changes: Any) -> Config:
    """Documents of 3 to 40 bytes, rows of 32 tokens: several share a row, some fill more than
    one."""
    texts = folder / "texts"
    if not texts.exists():
        texts.mkdir()
        for n in range(120):
            (texts / f"{n:03}.txt").write_text(f"{n} " * (1 + n % 13))
    plain = config_of(folder, "cpu", name=name, num_steps=STEPS, validate_every=STEPS)
    model = dataclasses.replace(
        plain.model,
        sequence_length=32,
        positions="rotary",
        dropout=0.1,
        attention_dropout=0.2,
        pattern="SlidingWindow",
        pattern_block=16,
    )
    data = DataConfig(
        path=str(texts),
        suffixes=(".txt",),
        cache=str(folder / "cache"),
        packing="documents",
        validation_fraction=0.2,
    )
    return dataclasses.replace(plain, model=model, data=data, **changes)


def one_by_one(config: Config, rows: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Nats per target and the gradient's norm, of each document alone, by the first values of the
    model."""
    model = GPT(dataclasses.replace(config.model, pattern=""), seed=config.train.seed).eval()
    total, count = torch.zeros(()), 0
    for tokens, targets, ids in zip(
        rows["tokens_BT"], rows["targets_BT"], rows["documents_BT"], strict=True
    ):
        for number in range(int(ids.max()) + 1):
            own = ids == number
            total = total + model.loss(tokens[own][None], targets[own][None], reduction="sum")
            count += int((targets[own] != -100).sum())
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return total.item() / count, norm.item()


def test_losses_are_those_of_the_documents_one_by_one(tmp_path):
    plain = packed(tmp_path, "plain")
    model = dataclasses.replace(plain.model, dropout=0.0, attention_dropout=0.0, pattern="")
    config = dataclasses.replace(plain, model=model)
    train(config)
    corpus = prepare(config.data)
    part = {"sequence_length": 32}
    batches = PackedBatches(corpus, global_batch=8, seed=config.train.seed, **part)
    assert batches.rows.fill > 0.9
    first = batches.next()
    assert (first["documents_BT"] > 0).any(), "no row has two documents"
    nats, norm = one_by_one(config, first)
    assert losses(config)[0] == pytest.approx(nats, rel=1e-5)
    assert norms(config)[0] == pytest.approx(norm, rel=1e-4)
    for change, words in (
        ({"model": dataclasses.replace(model, pattern="Dense")}, "model.pattern is 'Dense"),
        ({"data": dataclasses.replace(config.data, packing="none")}, "the same corpus"),
    ):
        longer = dataclasses.replace(config.train, num_steps=STEPS + 1)
        with pytest.raises((ConfigError, CorpusError), match=words):
            train(dataclasses.replace(config, train=longer, **change), resume=True)
    held_out = packed_validation_rows(corpus, num_sequences=6, **part)
    assert len(held_out["tokens_BT"]) > 1
    assert (config.folder / "sample.txt").read_text()
    data = TextData(config, make_mesh(config, device_type="cpu"))
    row = int((held_out["documents_BT"].amax(1) > 0).nonzero()[0])
    data._held_out = {name: rows[row:] for name, rows in held_out.items()}
    first_document = held_out["tokens_BT"][row][held_out["documents_BT"][row] == 0]
    assert torch.equal(data.prompt(64), first_document)
    assert torch.equal(data.prompt(2), first_document[:2])


@pytest.mark.parametrize(
    ("ranks", "parallel", "stage"),
    [
        full(2, {}, 0),
        (2, {"tp": 2, "sequence_parallel": True}, 0),
        (2, {"pp": 2, "num_microbatches": 2}, 2),
    ],
)
def test_no_layout_changes_losses(world, tmp_path, reference, ranks, parallel, stage):
    plain = packed(tmp_path, "plain")
    config = packed(tmp_path, "cut", parallel=ParallelConfig(**parallel), zero=ZeroConfig(stage))
    plain = reference(plain)
    outcomes = world(ranks).run(train_on_rank, config)
    assert [getattr(outcome, "steps", outcome) for outcome in outcomes] == [STEPS] * ranks
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    validated = [
        read_rows(each.folder / "metrics.jsonl")[-1]["validation_loss"] for each in (config, plain)
    ]
    assert validated[0] == pytest.approx(validated[1], rel=1e-5)


def test_runs_that_take_no_documents(tmp_path):
    with pytest.raises(ValueError, match=r"data.packing is 'documents', which a run over text"):
        packed(tmp_path, "run", task=TaskConfig(kind="passages"))
