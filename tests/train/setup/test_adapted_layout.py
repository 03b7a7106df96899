"""[parallel] adapt: a configuration for any number of ranks, that passes every check of its own."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from pyops.cli.commands import main
from pyops.config import Config, ConfigError, OptimizerConfig, TrainConfig, ZeroConfig, plan_for_run
from pyops.config.parallel_config import ParallelConfig
from pyops.config.reading import load_config
from pyops.elastic import Grid
from pyops.elastic.membership import GIB
from pyops.models import GPT, GPTConfig
from pyops.train.host import run_folder as folders
from pyops.train.host.run_folder import continues, finished, prepare_folder
from pyops.train.lr_range import lr_range_test
from pyops.train.setup.adapted_layout import adapted, limits_of, trouble_ahead
from tests.train.tiny_run import config_of

pytestmark = pytest.mark.cpu_only

MODEL = GPTConfig(sequence_length=8, num_layers=3, num_heads=4, dim=16)


def config(
    *,
    batch: int = 8,
    micro_batch: int = 0,
    zero: int = 0,
    optimizer: str = "adamw",
    compile: bool = False,
    model: GPTConfig = MODEL,
    **parallel: Any,
) -> Config:
    return Config(
        model=model,
        parallel=ParallelConfig(adapt=True, **parallel),
        zero=ZeroConfig(zero),
        optimizer=OptimizerConfig(optimizer),
        train=TrainConfig(batch=batch, micro_batch=micro_batch, compile=compile),
    )


def check_tp(model: GPTConfig, tp: int) -> None:
    from pyops.tensor_parallel.layers.head_groups import check_heads

    check_heads(model.num_heads, model.kv_heads, tp)


CASES = [
    {}, {"micro_batch": 2}, {"batch": 12, "pp": 2, "num_microbatches": 3, "recompute": "always"},
    {"tp": 2, "zero": 3}, {"pp": 2, "zero": 1}, {"pp": 2, "schedule": "zbv"},
    {"pp": 2, "schedule": "interleaved", "v": 2}, {"optimizer": "lamb", "pp": 2},
    {"optimizer": "onebit_adam"}, {"compile": True, "tp": 2}, {"dp": 2, "tp": 2},
    {"model": dataclasses.replace(MODEL, num_kv_heads=1), "tp": 4},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_planner_allows_is_what_the_configuration_takes(case):
    """All layouts of up to 8 ranks, by the checks of the configuration itself."""
    given = config(**case)
    limits, most = limits_of(given), given.parallel.dp or 99
    for degrees in itertools.product(range(1, 9), repeat=3):
        grid = Grid(*degrees)
        if grid.ranks > 8:
            continue
        alone = {"num_microbatches": 0, "recompute": "never"} if grid.pp == 1 else {}
        try:
            parallel = dataclasses.replace(
                given.parallel, adapt=False, tp=grid.tp, pp=grid.pp, dp=grid.dp, **alone
            )
            made = dataclasses.replace(given, parallel=parallel)
            made.check_ranks(grid.ranks)
            check_tp(given.model, grid.tp)
            taken = grid.dp <= most
        except ValueError:
            taken = False
        assert (limits.why_not(grid) is None) == taken, (grid, limits.why_not(grid))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_number_of_ranks_has_a_configuration(case):
    for ranks in range(1, 13):
        given = config(**case)
        found, choice = adapted(given, ranks)
        grid, parallel = choice.grid, found.parallel
        assert (parallel.tp, parallel.pp, parallel.dp) == (grid.tp, grid.pp, grid.dp)
        assert grid.ranks + choice.idle == ranks
        assert not parallel.adapt
        found.check_ranks(grid.ranks)
        assert (grid.tp, grid.pp) <= (given.parallel.tp, given.parallel.pp)
        assert found.train.batch == given.train.batch
        share = given.train.batch // grid.dp
        micro_batches = parallel.cut(share, micro_batch=found.train.micro_batch)
        assert share % micro_batches == 0
        if grid.pp > 1:
            plan = plan_for_run(found, num_rows=share)
            assert plan.schedule().num_microbatches == micro_batches
        if ranks >= given.parallel.tp * given.parallel.pp:
            assert (grid.tp, grid.pp) == (given.parallel.tp, given.parallel.pp)


def test_what_a_pipeline_kept_small_stays_small():
    given = config(batch=12, pp=2, num_microbatches=3, recompute="always")
    found, _ = adapted(given, 1)
    assert (found.parallel.num_microbatches, found.parallel.recompute, found.parallel.pp) == (
        0,
        "never",
        1,
    )
    assert found.train.micro_batch == 4
    assert found.recompute.modules == ("blocks.*",)
    kept, _ = adapted(given, 2)
    assert (kept.parallel.num_microbatches, kept.parallel.recompute, kept.parallel.pp) == (
        3,
        "always",
        2,
    )
    assert (kept.train.micro_batch, kept.recompute.modules) == (0, ())


def test_memory():
    numel = sum(
        parameter.numel() for parameter in GPT(MODEL, device="meta", seed=None).parameters()
    )
    limits = limits_of(config(memory_bytes=GIB))
    assert sum(limits.parameters) == numel + MODEL.vocab_size * MODEL.dim, (
        "what is tied is in both layers"
    )
    assert limits.memory == 2**30
    assert limits.each == (4.0, 4.0, 8.0)
    of_bf16 = dataclasses.replace(
        config(memory_bytes=GIB, optimizer="sgd"),
        precision=dataclasses.replace(Config().precision, dtype="bf16"),
    )
    assert limits_of(of_bf16).each == (2.0, 2.0, 4.0 + 4.0)
    away = dataclasses.replace(config(memory_bytes=GIB), zero=ZeroConfig(1, offload="cpu"))
    assert limits_of(away).each == (4.0, 4.0, 0.0)
    assert adapted(config(tp=2, batch=6, memory_bytes=GIB), 3)[1].grid == Grid(dp=3), (
        "it fits whole"
    )
    assert adapted(config(tp=2, batch=6), 3)[1].grid == Grid(tp=2), (
        "nobody knows whether it fits whole"
    )
    whole = sum(limits.parameters) * 16 / 2**30
    assert adapted(config(memory_bytes=int(0.8 * whole * GIB)), 2)[1].grid.tp == 2
    with pytest.raises(
        ConfigError,
        match=r"parallel.adapt: tp 1 x pp 1 x dp 1 takes .* no layout of 1 ranks takes less",
    ):
        adapted(config(memory_bytes=int(0.8 * whole * GIB)), 1)


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="memory_bytes is 2, which only adapt looks at; set adapt to true"
    ):
        ParallelConfig(memory_bytes=2)
    with pytest.raises(ValueError, match="memory_bytes is -1; it must be 0 or more"):
        ParallelConfig(adapt=True, memory_bytes=-1)
    path = tmp_path / "c.toml"
    lines = [
        "[parallel]",
        "adapt = true",
        "memory_bytes = 2",
        "[task]",
        'kind = "digits"',
        "[vit]",
        "image_size = 8",
    ]
    path.write_text("\n".join([*lines, "num_channels = 1", "patch_size = 2", "num_labels = 10"]))
    with pytest.raises(
        ConfigError,
        match=r"parallel.memory_bytes is 2, which is for task.kind text alone; set it to 0",
    ):
        adapted(load_config(path), 2)
    fixed = dataclasses.replace(config(), parallel=ParallelConfig())
    with pytest.raises(
        ConfigError,
        match=r"train.batch is 8 sequences, which 3 ranks can't share; .* parallel.adapt to true",
    ):
        adapted(fixed, 3)
    with pytest.raises(
        ConfigError, match=r"tp is 2, of which 3 ranks are no multiple; .* parallel.adapt to true"
    ):
        adapted(dataclasses.replace(fixed, parallel=ParallelConfig(tp=2)), 3)


def test_a_range_test_takes_all_ranks(monkeypatch, tmp_path):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "5", **meeting}.items():
        monkeypatch.setenv(name, value)
    given = dataclasses.replace(config_of(tmp_path, "cpu"), parallel=ParallelConfig(adapt=True))
    with pytest.raises(
        ConfigError,
        match=r"parallel.adapt: 5 ranks can't share the model: 5 models can't share a batch of 8",
    ):
        lr_range_test(given)


@pytest.mark.parametrize(
    ("before", "now", "restarts", "goes_on"),
    [
        ("a", "a", 0, True),  # a new agent, or one that was told to begin anew, counts no restart
        (
            "a",
            "b",
            1,
            False,
        ),  # another torchrun's, whose first attempt failed before it touched the folder
        ("none", "none", 0, False),
        ("none", "none", 2, True),
        (None, "a", 1, False),
        ("a", None, 0, False),
    ],
)
def test_who_started_a_run_goes_on_with_it(monkeypatch, tmp_path, before, now, restarts, goes_on):
    def torchrun(name: str | None, count: int) -> None:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        if name is not None:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)

    given = config_of(tmp_path, torch.device("cpu"))
    torchrun(before, 0)
    assert not continues(given.folder)
    prepare_folder(given, resume=False)
    torchrun(now, restarts)
    assert continues(given.folder) == goes_on
    finished(given.folder)
    assert not continues(given.folder)


def test_the_restarts_of_any_agent_count(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    prepare_folder(given := config_of(tmp_path, "cpu"), resume=False)
    monkeypatch.setattr(folders, "gather", lambda value: [value, 3])
    assert continues(given.folder)


def test_the_command_says_what_would_be_chosen(capsys, tmp_path):
    (tmp_path / "c.toml").write_text(
        "[model]\nnum_heads = 2\n[train]\nbatch = 8\n[parallel]\ntp = 2\n"
    )
    assert (
        main(["plan", str(tmp_path / "c.toml"), "--ranks", "3", "--set", "train.num_steps=3"]) == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "    1 rank    tp 1 x pp 1 x dp 1: tp 2 x pp 1 takes 2 ranks, and there is 1",
        "    2 ranks   tp 2 x pp 1 x dp 1: as asked for",
        "    3 ranks   tp 2 x pp 1 x dp 1: as asked for; 1 of 3 ranks waits, as another "
        "model takes 2 ranks",
    ]
    little = ["--set", "parallel.adapt=true", "--set", "parallel.memory_bytes=10737418"]
    assert main(["plan", str(tmp_path / "c.toml"), "--ranks", "1", *little]) == 0
    assert "no layout of 1 ranks takes less" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "d.toml")]) == 2
    assert "can't be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shared", "nodes", "warned"),
    [("True", "2", True), ("True", "1", False), ("False", "2", False)],
)
def test_a_store_in_which_who_joins_would_hang_is_told(monkeypatch, shared, nodes, warned):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in trouble_ahead()) == warned
