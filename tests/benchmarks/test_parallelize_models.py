"""The measurement of docs/tensor_parallel_models.md can fail: a wrong cut, a changed model and a
raw error are told apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parallel.tensor import parallelize_class
from benchmarks.parallel.tensor.guessed_plans import guessed
from benchmarks.parallel.tensor.parallelize_class import DEFECTS, row_of
from benchmarks.parallel.tensor.parallelize_page import TITLES, page
from benchmarks.parallel.tensor.tiny_models import tiny
from pyops.tensor_parallel import parallelize

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parents[2]
MODEL = "GPTNeoXForCausalLM"


def unchecked(model: nn.Module, **options: Any) -> Any:
    """Heads taken apart as q, k, v of all heads, where q, k, v of each head lie together."""
    plan = {
        "attention": "attention",
        "query_key_value": "packed columns",
        "attention.dense": "rows",
    }
    return parallelize(model, group=options["group"], plan=plan, check=False)


def forgets_a_sum(model: nn.Module, **options: Any) -> Any:
    found = parallelize(model, **options)
    if options["group"].rank() == 1:
        model.get_parameter("gpt_neox.final_layer_norm.weight").register_hook(torch.zeros_like)
    return found


def changes_a_number(model: nn.Module, **options: Any) -> Any:
    model.get_submodule("gpt_neox.layers.1.attention").head_size = 3
    raise ValueError("no")


def changes_a_bit(model: nn.Module, **options: Any) -> Any:
    with torch.no_grad():
        model.get_parameter("gpt_neox.layers.1.mlp.dense_h_to_4h.bias")[3] += 1e-9
    raise ValueError("no")


def leaves_a_hook(model: nn.Module, **options: Any) -> Any:
    model.get_submodule("gpt_neox.layers.1").register_forward_hook(lambda *_: None)
    raise ValueError("no")


def draws_a_number(model: nn.Module, **options: Any) -> Any:
    torch.rand(1)
    raise ValueError("no")


def fails(model: nn.Module, **options: Any) -> Any:
    raise KeyError("no")


MUTANTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a wrong cut": (unchecked, "WRONG", "an output differs"),
    "a gradient of zero": (forgets_a_sum, "WRONG", "gpt_neox.final_layer_norm.weight differs"),
    "a number of heads": (changes_a_number, "changed", "head_size"),
    "a bit of a parameter": (changes_a_bit, "changed", "dense_h_to_4h.bias"),
    "a hook": (leaves_a_hook, "changed", "_forward_hooks"),
    "the generator": (draws_a_number, "changed", "the generator"),
    "a raw error": (fails, "raised", "KeyError"),
    "nothing": (parallelize, "right", ""),
}


def rows(rank: int, group: dist.ProcessGroup) -> dict[str, dict[str, str]]:
    found = {}
    for name, (mutant, _, _) in MUTANTS.items():
        parallelize_class.parallelize = mutant
        try:
            found[name] = row_of(tiny(MODEL), group=group, guess=False)
        finally:
            parallelize_class.parallelize = parallelize
    return found


@pytest.mark.full
def test_each_sort_of_defect_is_a_row_of_its_own(world):
    first, second = world(2).run(rows, timeout=240)
    for name, (_, result, why) in MUTANTS.items():
        assert first[name] == second[name]
        assert first[name]["result"] == result, (name, first[name])
        assert why in first[name]["why"], (name, first[name])


def test_a_plan_is_guessed_from_names():
    plan = guessed(tiny("LlamaForCausalLM"))
    assert plan["model.layers.0.self_attn"] == "attention"
    assert plan["model.layers.1.self_attn.k_proj"] == "columns"
    assert plan["model.layers.1.mlp.down_proj"] == "rows"
    assert plan["model.embed_tokens"] == "vocabulary"
    assert plan["lm_head"] == "logits"
    assert plan["model.layers"] == "blocks"
    assert guessed(tiny(MODEL))["gpt_neox.layers.0.attention.query_key_value"] == "head columns"
    assert guessed(tiny("BertModel"))["encoder.layer.0.attention.output.dense"] == "head rows"


def test_the_page_counts_every_class_once():
    found = [
        {"class": "A", "result": "right", "why": "", "guess": "refused", "guess_why": "no"},
        {"class": "B", "result": "not made", "why": "too large"},
    ]
    text = page(found, ["A", "B", "C"])
    assert "exports 3 model classes" in text
    assert (
        "Of these 1 were tried, 1 could not be made small, and 1 are not measured"
        in text.replace("\n", " ")
    )
    assert "| Right | 1 | 0 |" in text
    assert "| Refused, and unchanged | 0 | 1 |" in text
    assert "## Not measured yet: 1\n\nC\n" in text


def test_the_results_that_are_kept_have_no_defect():
    lines = (
        (ROOT / "benchmarks" / "results" / "models" / "parallelize.jsonl").read_text().splitlines()
    )
    kept = [json.loads(line) for line in lines]
    assert len({row["class"] for row in kept}) == len(kept)
    for row in kept:
        assert row["result"] in TITLES
        assert row["result"] not in DEFECTS, row
        assert row.get("guess") not in DEFECTS, row
