"""A sample of `python -m benchmarks.mutations`: nothing raw, nothing silent; and what that calls a
failure is one."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutations import __main__ as mutations
from benchmarks.mutations.__main__ import KINDS, judge, run
from benchmarks.mutations.odd_values import Change
from pyops import hub
from pyops.checkpoint import CheckpointError
from pyops.config import ConfigError, load_config
from pyops.models import BERTConfig, GPTConfig, T5Config, ViTConfig

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("kind", list(KINDS))
def test_odd_input_is_refused_by_name_or_read_as_what_it_says(kind):
    found = run(40, kinds=[kind], seed=5)
    assert not [verdict for verdict in found if verdict.failed]
    assert Counter(verdict.outcome for verdict in found).keys() == {"read", "refused"}, (
        "both happen"
    )


class Subject:
    """One whose reading does what the test says."""

    refusals = (CheckpointError,)

    def __init__(self, way: Any) -> None:
        self.way = way

    def mutate(self, rng: random.Random, folder: Path) -> Change:
        return Change("nothing", ("manifest.json",), ("bytes",))

    def read(self, folder: Path, change: Change) -> str:
        if isinstance(self.way, Exception):
            raise self.way
        return self.way() if callable(self.way) else self.way


@pytest.mark.parametrize(
    ("way", "outcome"),
    [
        ("", "read"),
        ("w differs", "silent"),
        (CheckpointError("manifest.json: bytes is -1"), "refused"),
        (CheckpointError("manifest.json is damaged"), "raw"),  # which entry?
        (CheckpointError("bytes is -1"), "raw"),  # of which file?
        (TypeError("manifest.json bytes"), "raw"),
    ],
)
def test_what_counts_as_a_failure(tmp_path, way, outcome):
    assert judge("checkpoint", Subject(way), tmp_path / "x", 0).outcome == outcome


def _compute() -> str:
    while True:
        pass


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@pytest.mark.parametrize(
    ("way", "wait", "outcome", "text"),
    [
        (_compute, 60.0, "slow", "more than 0.2 s of CPU time"),
        (lambda: _sleep(0.5), 60.0, "read", ""),  # a busy host, which lets others go first
        (lambda: _sleep(60.0), 0.3, "slow", "more than 0.3 s in all"),
    ],
)
def test_what_is_slow_is_told_by_cpu_time_and_what_waits_by_the_clock(
    tmp_path, monkeypatch, way, wait, outcome, text
):
    monkeypatch.setattr(mutations, "LIMIT", 0.2)
    monkeypatch.setattr(mutations, "WAIT", wait)
    before = [signal.getsignal(kind) for kind in (signal.SIGPROF, signal.SIGALRM)]
    found = judge("checkpoint", Subject(way), tmp_path / "x", 0)
    assert (found.outcome, found.text) == (outcome, text)
    assert [signal.getitimer(timer)[0] for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL)] == [
        0.0,
        0.0,
    ]
    assert [signal.getsignal(kind) for kind in (signal.SIGPROF, signal.SIGALRM)] == before


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (GPTConfig, {"hidden": 1 << 62}, "hidden"),
        (GPTConfig, {"num_layers": 1 << 62}, "num_layers"),
        (GPTConfig, {"num_heads": 1 << 61, "dim": 1 << 61}, "num_heads"),
        (GPTConfig, {"dim": 10**400}, "dim"),
        (GPTConfig, {"sequence_length": 1 << 50, "positions": "rotary"}, "sequence_length"),
        (BERTConfig, {"vocab_size": 1 << 55}, "vocab_size"),
        (T5Config, {"num_buckets": 1 << 60}, "num_buckets"),
        (ViTConfig, {"image_size": 1 << 40}, "image_size"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_by_name(kind, changes, field):
    with pytest.raises(
        ValueError,
        match=f"^{field} is [0-9]+; (the model would take some .* TiB|sizes are less than 2)",
    ):
        kind(**changes)


def test_the_largest_models_there_are_can_be_described():
    GPTConfig(
        vocab_size=256000,
        dim=16384,
        num_layers=126,
        num_heads=128,
        hidden=53248,
        sequence_length=1 << 20,
        positions="rotary",
        activation="swiglu",
    )


def test_a_model_larger_than_this_host_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    from pyops.train import train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text("[model]\ndim = 1048576\nnum_layers = 3\n")
    with pytest.raises(
        ConfigError,
        match=r"model\.dim is 1048576; the weights would take .* GiB, this host has [0-9.]+: make",
    ):
        train(load_config(tmp_path / "c.toml"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('name = "a\\u0000b"', "name is .* a null byte"),
        ('[train]\nfolder = "a\\u0000b"', r"train\.folder is .* a null byte"),
        (f"[train]\nseed = {10**400}", r"train\.seed is 1000.*64 bits"),
        (
            f"[model]\nhidden = {1 << 62}",
            r"model\.hidden is 4611686018427387904; the model would take",
        ),
    ],
)
def test_what_a_configuration_can_not_say(tmp_path, line, message):
    (tmp_path / "c.toml").write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "c.toml")


def test_an_encoder_alone_is_refused_by_name(tmp_path):
    from pyops.models import T5

    hub.save(T5(T5Config(vocab_size=9, num_layers=1, num_heads=1, dim=4)), tmp_path / "m")
    text = (tmp_path / "m" / "config.json").read_text()
    (tmp_path / "m" / "config.json").write_text(
        text.replace('"is_encoder_decoder": true', '"is_encoder_decoder": false')
    )
    with pytest.raises(hub.HubError, match="is_encoder_decoder = False, pyops computes True only"):
        hub.load(tmp_path / "m")
