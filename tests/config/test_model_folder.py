"""[model] folder: which sections go with it, and the plan that they make."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pyops.config import ConfigError, load_config, plan_for_run
from pyops.parallel import ParallelPlan, PipelineOptions
from pyops.precision import LossScale
from pyops.zero import ZeroConfig

pytestmark = pytest.mark.cpu_only


def config_file(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text('[model]\nfolder = "llama"\n' + text)
    return path


def test_the_sections_make_the_plan(tmp_path):
    text = """
        sequence_length = 48
        [parallel]
        tp = 2
        pp = 3
        dp = 4
        schedule = "interleaved"
        v = 2
        num_microbatches = 6
        recompute = "always"
        [zero]
        stage = 1
        [recompute]
        modules = ["model.layers.*"]
        [precision]
        dtype = "fp16"
        initial_scale = 8.0
        hysteresis = 3
        [optimizer]
        max_grad_norm = 0.5
        [train]
        bucket_bytes = 1000
        compile = true
    """
    config = load_config(config_file(tmp_path, text))
    assert (config.model_folder.folder, config.model_folder.sequence_length) == ("llama", 48)
    plan = plan_for_run(config, num_rows=12)
    scale = plan.zero.loss_scale
    assert scale is not None
    wanted = LossScale(initial=8.0, window=1000, hysteresis=3, minimum=1.0)
    assert scale.state_dict() == wanted.state_dict()
    assert plan == ParallelPlan(
        tp=2,
        pp=3,
        dp=4,
        pipeline=PipelineOptions("interleaved", 6, 2, "always"),
        zero=ZeroConfig(stage=1, bucket_bytes=1000, loss_scale=scale),
        recompute=("model.layers.*",),
        precision="fp16",
        compile=True,
        max_grad_norm=0.5,
    )


def test_a_batch_is_cut_as_train_says(tmp_path):
    text = "[train]\nmicro_batch = 2\n[optimizer]\nmax_grad_norm = 0.0"
    plan = plan_for_run(load_config(config_file(tmp_path, text)), num_rows=8)
    assert (plan.num_microbatches, plan.max_grad_norm) == (4, math.inf)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dim = 3", r"model.dim is 3, but model.folder is 'llama', whose config.json says what"),
        ("sequence_length = 1", r"model.sequence_length is 1; it must be 2 or more"),
        ("sequence_lenght = 8", r"unknown key model.sequence_lenght = 8; did you mean model.sequ"),
        ('[task]\nkind = "digits"', r'task.kind is "digits", but model.folder is'),
        ('[elastic]\nfreeze = "plan"', r"elastic"),
        (
            '[data]\ntokenizer = "bpe"',
            r'data.tokenizer is "bpe", but .* has a tokenizer',
        ),
        ('[data]\nlong_rows = "drop"', r"data.long_rows is 'drop'; choose one of refuse, truncate"),
        ('[optimizer]\nname = "onebit_adam"', r'"onebit_adam", but .*; set it to "adamw"'),
        ("[optimizer]\nlayer_decay = 0.5", r"optimizer.layer_decay is 0.5, but .*; set it to 1.0"),
        (
            '[optimizer]\nname = "lamb"\n[parallel]\ntp = 2',
            r'"lamb", but .*parallel.tp 2 .*"a',
        ),
        (
            '[communication]\ncodec = "int8"',
            r'communication.codec is "int8", but .*set it to "n',
        ),
        ('[recompute]\noffload = "cpu"', r'recompute.offload is "cpu", but'),
        ("[parallel]\nadapt = true", r"parallel.adapt is true, but .*; set it to false"),
        ('[train]\nalgorithm = "ring"', r'train.algorithm is "ring", but .*; set it to "auto"'),
        ("[parallel]\nsequence_parallel = true", r"sequence_parallel is true, but .* which is 1; "),
    ],
)
def test_what_does_not_go_with_a_folder_is_refused(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        load_config(config_file(tmp_path, text))
