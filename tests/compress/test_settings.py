"""What the TOML file of a compression may say, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from pyops.compress import DistillStep, compress_config_of, load_compress_config
from pyops.config import ConfigError
from tests.project.documents import ROOT

pytestmark = pytest.mark.cpu_only


def tables(*steps: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "model": {"folder": "in", "output": "out", **sections.get("model", {})},
        "data": {"train": "t.txt", **sections.get("data", {})},
        "measure": sections.get("measure", {}),
        "step": list(steps),
    }


def test_tables_become_steps_in_order():
    config = compress_config_of(
        tables({"method": "distill", "keep": [0, 2], "lr": 1}, {"method": "finetune"})
    )
    first, second = config.steps
    assert isinstance(first, DistillStep)
    assert (first.keep, first.lr, first.temperature) == ((0, 2), 1.0, 2.0)
    assert (second.method, second.num_steps) == ("finetune", 100)


def test_the_example_is_read():
    config = load_compress_config(
        ROOT / "examples" / "compress" / "compress.toml", overrides=["model.output=elsewhere"]
    )
    assert config.model.output == "elsewhere"
    assert config.steps


FINETUNE = {"method": "finetune"}


PRUNE = {"method": "prune", "sparsity": 0.5}
QUANTIZE = {"method": "quantize"}
KEEP = {"method": "distill", "keep": [0]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (tables(), "there is no [[step]]; write one or more"),
        (tables({"lr": 1.0}), "step 1 has no method; write one of distill"),
        (tables(FINETUNE, {"method": "distil"}), "step 2 has method 'distil'; did you mean"),
        (tables({"method": 3}), "step 1 has method 3; write one of"),
        (tables({**FINETUNE, "stepz": 3}), "unknown key step 1 (finetune).stepz = 3"),
        (tables({**FINETUNE, "num_steps": 0}), "step 1 (finetune).num_steps is 0; it must be 1"),
        (tables({**FINETUNE, "lr": 0.0}), "step 1 (finetune).lr is 0.0; it must be more than 0"),
        (tables({**FINETUNE, "batch": "8"}), "step 1 (finetune).batch is '8'; it must be a whole"),
        (tables({**FINETUNE, "only": ["a"]}), "rank is 0, with which all weights learn"),
        (tables({"method": "distill", "keep": [2, 1]}), "keep is [2, 1]; name each layer"),
        (tables({"method": "distill", "keep": [-1]}), "keep is [-1]; name each layer"),
        (tables({"method": "distill", "keep": [1, 1]}), "keep is [1, 1]; name each layer that"),
        (tables({"method": "distill", "soft": 0}), 'write method = "finetune"'),
        (tables({"method": "distill", "temperature": 0}), "temperature is 0.0; it must be more"),
        ({**tables(), "step": {"method": "prune"}}, "write [[step]] before each"),
        (tables(FINETUNE, model={"folder": ""}), 'model.folder is ""; name the folder that is'),
        (tables(FINETUNE, model={"output": ""}), 'model.output is ""; name the folder that is'),
        (tables(FINETUNE, model={"output": "in"}), "model.output is 'in', the folder in"),
        (tables(FINETUNE, model={"dtype": "int8"}), "model.dtype is 'int8'; it must be one of"),
        (tables(FINETUNE, data={"train": ""}), "models are scored on text"),
        (
            tables(FINETUNE, data={"train": "", "held_out": "h.txt"}),
            'data.train is "", but step 1 (finetune) needs text to learn from',
        ),
        (tables(FINETUNE, data={"validation_fraction": 1.0}), "data.validation_fraction is 1.0"),
        (tables(FINETUNE, measure={"rounds": -1}), "measure.rounds is -1; it must be 0 or more"),
        (tables({"method": "prune"}), "sparsity is 0 and pattern ''; give one of them"),
        (tables({**PRUNE, "pattern": "2:4"}), "sparsity is 0.5 and pattern '2:4'; give one"),
        (tables({"method": "prune", "pattern": "half"}), "pattern is 'half'; write n of m"),
        (tables({**PRUNE, "sparsity": 1.0}), "sparsity is 1.0; it must be 0 or more, less than 1"),
        (tables({**PRUNE, "permute": True}), "permute is true, but pattern is ''"),
        (tables({**PRUNE, "least": 0.1}), "least is 0.1, but scope is 'layer'"),
        (
            tables({**PRUNE, "least": 0.6, "scope": "global"}),
            "least is 0.6, but a sparsity of 0.5 leaves 0.5 of all weights",
        ),
        (tables({**PRUNE, "how": "slowly"}), "how is 'slowly'; it must be one of gradual, once"),
        (tables({**QUANTIZE, "weights": "int5"}), "weights is 'int5'; it must be one of"),
        (tables({**QUANTIZE, "weights": "int4", "activations": "token"}), "whose products take"),
        (tables({**QUANTIZE, "algorithm": "awq", "num_steps": 3}), "is rounded to nearest"),
        (tables(QUANTIZE, PRUNE), "step 2 (prune) follows step 1 (quantize), whose codes"),
        (tables(PRUNE, QUANTIZE, FINETUNE), "step 3 (finetune) follows step 2 (quantize)"),
        (tables(PRUNE, KEEP), "step 2 (distill) follows step 1 (prune), and keep is [0]: masks"),
        (tables(PRUNE, {**FINETUNE, "rank": 2}), "adapters would fill the pruned weights"),
        (tables(PRUNE, {**QUANTIZE, "algorithm": "gptq"}), "moves pruned weights, too"),
        (
            tables(PRUNE, {**PRUNE, "sparsity": 0.4}),
            "sparsity is 0.4, there 0.5; give a larger one",
        ),
        (tables(PRUNE, {**PRUNE, "sparsity": 0.8, "only": ["*.up*"]}), "only is ('*.up*',), there"),
        (tables(PRUNE, {"method": "prune", "pattern": "2:4"}), "pattern is '2:4', there ''"),
        (tables(*[{"method": "prune", "pattern": "2:4"}] * 2), "so that some of what is pruned"),
        (tables(FINETUNE, model={"form": "packed"}), "but no step prunes; leave it out"),
        (tables(PRUNE, model={"form": "2:4"}), "but a step prunes in another way"),
        (
            tables({**QUANTIZE, "algorithm": "gptq"}, data={"train": "", "held_out": "h.txt"}),
            "step 1 (quantize) needs text to calibrate on",
        ),
        ({"step": [FINETUNE], "data": {"train": "t"}}, 'model.folder is ""'),
    ],
)
def test_what_makes_no_sense_is_refused(given, said):
    with pytest.raises(ConfigError) as refused:
        compress_config_of(given)
    assert said in str(refused.value)
