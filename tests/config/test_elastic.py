"""[elastic] of a configuration: its values, what it does not go with, and the policy that it
names."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from pyops.config import Config, ConfigError, ElasticConfig, load_config
from pyops.elastic import Bound, GradientNorm, PercentileOfChange, Sampler

pytestmark = pytest.mark.cpu_only

ON = "[model]\ntied_head = false\n[elastic]\nfreeze = 'gradient_norm'\n"


def read(tmp_path: Path, text: str) -> Config:
    (tmp_path / "c.toml").write_text(text)
    return load_config(tmp_path / "c.toml")


def test_nothing_is_frozen_unless_asked_for(tmp_path):
    assert not read(tmp_path, "").elastic.on
    # what it would not go with is then no matter
    assert not read(tmp_path, "[zero]\nstage = 3\n[elastic]\nalpha = 0.5").elastic.on
    config = read(tmp_path, ON + "alpha = 0.25\ncache_gib = 2\n[parallel]\npp = 4")
    assert (config.elastic.on, config.elastic.alpha, config.elastic.cache_gib) == (True, 0.25, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "freeze = 'gradients'",
            r"elastic.freeze is 'gradients'; it must be one of none, gradient_norm, "
            r"bound, percentile",
        ),
        ("alpha = 0", r"elastic.alpha is 0.0; it must be more than 0 and less than 1, such as 0.2"),
        ("alpha = 1", r"elastic.alpha is 1.0; it must be more than 0 and less than 1"),
        ("alpha = nan", r"elastic.alpha is nan; it must be a number"),
        ("percent = 101", r"elastic.percent is 101.0; it must be a percentile from 0 to 100"),
        ("every = -1", r"elastic.every is -1; it must be 0 or more"),
        ("every = 2.5", r"elastic.every is 2.5; it must be a whole number"),
        ("cache = true", r"elastic.cache is True; it must be a text in quotes"),
        ("cache = 'yes'", r"elastic.cache is 'yes'; it must be one of auto, on, off"),
        ("cache_gib = -1", r"elastic.cache_gib is -1.0; it must be 0 or more"),
        ("cache_dtype = 'fp16'", r"elastic.cache_dtype is 'fp16'; it must be one of same, bf16"),
        (
            "batch_policy = 'each'",
            r"elastic.batch_policy is 'each'; it must be one of global, replica",
        ),
        (
            "lr_rule = 'square'",
            r"elastic.lr_rule is 'square'; it must be one of linear, sqrt, constant",
        ),
        ("compress = 1", r"elastic.compress is 1; it must be true or false"),
        ("alhpa = 0.2", r"unknown key elastic.alhpa = 0.2; did you mean elastic.alpha\?"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, f"[elastic]\n{text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[zero]\nstage = 1", r"zero.stage is 1: .*; set zero.stage to 0,"),
        (
            "[recompute]\nmodules = ['blocks.*']\noffload = 'cpu'",
            r"recompute.offload is 'cpu', .*; set recompute.offload",
        ),
        ("[parallel]\ntp = 2", r"parallel.tp is 2: .*; set parallel.tp to 1,"),
        (
            "[parallel]\npp = 2\nschedule = 'zbv'",
            r"schedule is 'zbv', which has 4 stages on 2 ranks.*; set .* to \"1f1b\"",
        ),
        (
            "[parallel]\npp = 2\nschedule = 'interleaved'\nv = 2",
            r"schedule is 'interleaved', which has 4 stages",
        ),
        ("[train]\ncompile = true", r"train.compile is true: .*; set train.compile to false"),
        (
            "[optimizer]\nname = 'onebit_adam'",
            r"optimizer.name is 'onebit_adam': .*; set optimizer.name to \"adamw\"",
        ),
        (
            "[communication]\ncodec = 'int8'",
            r"communication.codec is 'int8', .*; set communication.codec to \"none\"",
        ),
    ],
)
def test_what_it_does_not_go_with(tmp_path, text, message):
    with pytest.raises(
        ConfigError,
        match=r"elastic.freeze is 'gradient_norm', but .*" + message + r".*or elastic.freeze to",
    ):
        read(tmp_path, ON + text)


def test_a_head_that_has_the_embeddings_weights(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"'bound', but model.tied_head is true: .*; set model.tied_head to false, or",
    ):
        read(tmp_path, "[elastic]\nfreeze = 'bound'")


def test_the_policy_that_is_named():
    assert ElasticConfig().policy() is None
    for name, kind in (("gradient_norm", GradientNorm), ("bound", Bound)):
        policy = ElasticConfig(freeze=name, alpha=1 / 3).policy()
        assert type(policy) is kind
        assert policy.alpha == Fraction(1, 3)
    policy = ElasticConfig(freeze="percentile", percent=30).policy()
    assert isinstance(policy, PercentileOfChange)
    assert policy.percent == 30


@pytest.mark.parametrize("alpha", [1e-6, 1 - 1e-6])
def test_every_alpha_that_is_taken_makes_a_policy(alpha: float):
    ElasticConfig(freeze="bound", alpha=alpha).policy()


@pytest.mark.parametrize("policy", ["global", "replica"])
@pytest.mark.parametrize("rule", ["linear", "sqrt", "constant"])
def test_the_sampler_knows_them_all(policy: str, rule: str):
    options = ElasticConfig(batch_policy=policy, lr_rule=rule)
    Sampler(8, batch=2, seed=0, batch_policy=options.batch_policy, lr_rule=options.lr_rule)
