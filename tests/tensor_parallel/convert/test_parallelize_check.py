"""A plan is checked against the uncut model before anything is changed, and what is refused stays
as it was, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parallel.tensor.tiny_models import tiny
from pyops.tensor_parallel import parallelize, whole_state_dict
from pyops.tensor_parallel.convert.check import trial_copy, trial_run
from pyops.tensor_parallel.convert.check.plan_trial import try_plan
from pyops.tensor_parallel.convert.plans import plan_of
from pyops.tensor_parallel.convert.replace_layers import replace_layers
from pyops.tensor_parallel.convert.replacement_plan import ReplacementPlan
from tests.allocated_memory import allocated
from tests.grids import full
from tests.tensor_parallel.convert.existing_models import PLAN, Mixed

pytestmark = pytest.mark.cpu_only

SPLIT = {"layers": "blocks", "self_attn": "attention", "self_attn.[qkv]_proj": "columns"}
LLAMA = {**SPLIT, "self_attn.o_proj": "rows"}
OUT = {**SPLIT, "self_attn.out_proj": "rows"}
T5 = {"*Attention": "attention", "*Attention.[qkv]": "columns", "*Attention.o": "rows"}
PICTURE = {"attention": "attention", "attention.[qkv]_proj": "columns", "attention.o_proj": "rows"}
Wrong = tuple[dict[str, Any], dict[str, str], dict[str, Any], str]

# Plans given by hand that come near: (of the configuration, the plan, options, what is said).
WRONG: dict[str, Wrong] = {
    "StableLmForCausalLM": (
        {"qk_layernorm": True},
        {**LLAMA, "norms.*": "partial"},
        {},
        "output logits differs by",
    ),
    "GlmForCausalLM": (
        {},
        {**LLAMA, "gate_up_proj": "columns", "down_proj": "rows"},
        {},
        "is model.layers.0.mlp.down_proj",
    ),
    "PersimmonForCausalLM": (
        {},
        {
            "self_attn": "attention",
            "query_key_value": "packed columns",
            "self_attn.dense": "rows",
            "*_layernorm": "partial",
        },
        {},
        "the plan does not fit",
    ),
    "GPTNeoXForCausalLM": (
        {},
        {"attention": "attention", "query_key_value": "packed columns", "attention.dense": "rows"},
        {},
        "the first module whose output differs is gpt_neox.layers.0.attention.dense",
    ),
    "BloomForCausalLM": (
        {},
        {
            "self_attention": "attention",
            "query_key_value": "packed columns",
            "self_attention.dense": "rows",
        },
        {},
        "the first module whose output differs is transformer.h.0.self_attention.dense",
    ),
    "DebertaV2ForMaskedLM": (
        {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "position_buckets": 4,
        },
        {"self": "attention", "self.*_proj": "columns", "attention.output.dense": "head rows"},
        {},
        "each rank has only a part of that of deberta.encoder.rel_embeddings.weight: "
        "make its module 'partial'",
    ),
    "CodeGenForCausalLM": (
        {},
        {"attn": "attention", "qkv_proj": "packed columns", "attn.out_proj": "rows"},
        {},
        "the plan does not fit",
    ),
    "Olmo2ForCausalLM": (
        {},
        {**LLAMA, "[qk]_norm": "partial"},
        {},
        "fails in model.layers.0.self_attn.q_norm when cut",
    ),
    "CohereForCausalLM": (
        {"use_qk_norm": True},
        {**LLAMA, "[qk]_norm": "partial"},
        {},
        "fails in model.layers.0.self_attn.q_norm when cut",
    ),
    "MPNetForMaskedLM": (
        {"relative_attention_num_buckets": 32},
        {"attn": "attention", "attn.[qkv]": "columns", "attn.o": "columns"},
        {},
        "the plan does not fit",
    ),
    "PhimoeForCausalLM": (
        {},
        LLAMA,
        {"sequence_parallel": True},
        "fails in model.layers.0.mlp when cut",
    ),
    "MixtralForCausalLM": (
        {},
        LLAMA,
        {"sequence_parallel": True},
        "fails in model.layers.0.mlp when cut",
    ),
    "XGLMForCausalLM": ({}, {**OUT, "fc1": "columns"}, {}, "the plan does not fit"),
    "BioGptForCausalLM": ({}, {**OUT, "fc2": "rows"}, {}, "the plan does not fit"),
    "MT5ForConditionalGeneration": (
        {},
        {**T5, "relative_attention_bias": "partial"},
        {},
        "the plan does not fit",
    ),
    "SwitchTransformersForConditionalGeneration": (
        {},
        {**T5, "relative_attention_bias": "partial"},
        {},
        "the plan does not fit",
    ),
    "BeitForImageClassification": (
        {"use_relative_position_bias": True},
        {**PICTURE, "relative_position_bias": "partial"},
        {},
        "the plan does not fit",
    ),
    "BigBirdForMaskedLM": (  # its forward replaces its attention modules where the text is short
        {},
        {
            "self": "attention",
            "self.query": "columns",
            "self.key": "columns",
            "self.value": "columns",
            "attention.output.dense": "head rows",
        },
        {},
        "the plan does not fit BigBirdForMaskedLM, which fails in",
    ),
    "SwinForImageClassification": ({}, {**PICTURE, "relative_position_bias": "partial"}, {}, ""),
}


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a refusal must leave: modules, attributes, hooks by identity; tensors by
    their bits."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = {
            key: value if isinstance(value, int) else id(value)
            for key, value in module.__dict__.items()
        }
        hooks = dict(module._forward_hooks), dict(module._forward_pre_hooks)
        found[name] = (id(module), type(module), attributes, hooks)
    for name, value in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        found[f"{name}'s bits"] = (
            id(value),
            value.requires_grad,
            value.grad,
            value.detach().clone(),
        )
    return found


def assert_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    assert list(after) == list(before)
    for name in before:
        if name.endswith("'s bits"):
            assert after[name][:3] == before[name][:3], name
            assert torch.equal(after[name][3], before[name][3]), name
        else:
            assert after[name] == before[name], name


def refused_alike(rank: int, group: dist.ProcessGroup, names: list[str]) -> dict[str, str]:
    texts = {}
    for name in names:
        changed, plan, options, _ = WRONG[name]
        model = tiny(name, **changed)
        before, generator = state(model), torch.get_rng_state()
        with pytest.raises(ValueError) as caught:
            parallelize(model, group=group, plan=plan, **options)
        assert_same(state(model), before)
        assert torch.equal(torch.get_rng_state(), generator)
        texts[name] = str(caught.value)
    return texts


# One of each way to fail; the others fail as one of these does.
WAYS_TO_FAIL = {
    "StableLmForCausalLM", "GlmForCausalLM", "GPTNeoXForCausalLM", "DebertaV2ForMaskedLM",
    "Olmo2ForCausalLM", "MixtralForCausalLM", "XGLMForCausalLM", "BigBirdForMaskedLM",
    "SwinForImageClassification",
}  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in WRONG if name in WAYS_TO_FAIL], id="ways"),
        full([name for name in WRONG if name not in WAYS_TO_FAIL], id="others"),
    ],
)
def test_plans_that_come_near_are_refused_and_change_nothing(world, names: list[str]):
    first, second = world(2).run(refused_alike, names, timeout=240)
    assert first == second
    assert len(first) == len(names) > 8
    for name, text in first.items():
        assert WRONG[name][-1] in text, (name, text)


class Unhookable(nn.Identity):
    def register_forward_pre_hook(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no hooks here")


def midway(rank: int, group: dist.ProcessGroup) -> str:
    """A failure on one rank, after modules were swapped there and everything was done on the
    other."""
    torch.manual_seed(1)
    model = Mixed()
    if rank == 1:
        model.stack[1]["mix"].register_forward_pre_hook = Unhookable().register_forward_pre_hook
    before = state(model)
    with pytest.raises(RuntimeError) as caught:
        parallelize(model, group=group, plan=PLAN, check=False)
    assert_same(state(model), before)
    return str(caught.value)


def test_a_failure_midway_on_one_rank_is_undone_on_all(world):
    assert world(2).run(midway) == ["no hooks here"] * 2


def there_and_back(rank: int, group: dist.ProcessGroup) -> None:
    """Fused layouts over gloo: the whole state_dict is the model's own, and so are its outputs."""
    for name in ("Phi3ForCausalLM", "GPTNeoXForCausalLM", "GemmaForCausalLM"):
        model = tiny(name)
        before = copy.deepcopy(model)
        report = parallelize(model, group=group)
        assert "gradients of 2 ranks, equal to those of the uncut model" in str(report)
        for (key, value), (other, reference) in zip(
            whole_state_dict(model, group=group).items(), before.state_dict().items(), strict=True
        ):
            assert key == other
            assert torch.equal(value, reference), key
        ids = torch.arange(3, 13).view(2, 5)
        torch.testing.assert_close(model(ids).logits, before(ids).logits, rtol=1e-4, atol=1e-5)


def test_fused_layouts_there_and_back(world):
    world(2).run(there_and_back, timeout=240)


MUTANTS: dict[str, tuple[dict[str, str], str]] = {
    "rows and columns of an MLP exchanged": (
        {"ffn.0": "rows", "ffn.2": "columns"},
        "stack.0.ffn.0",
    ),
    "rows left out": ({"ffn.0": "columns", "ffn.2": "whole"}, "stack.0.ffn.2"),
    "a norm of heads that is not said to be partial": (
        {"mix.norm": "whole"},
        "mix.norm has parameters within",
    ),
    "columns of which no sum comes": ({"mix": "whole", "mix.norm": "whole", "mix.out": "rows"}, ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_a_right_plan(name: str):
    """Tried with virtual ranks alone: nothing is communicated."""
    changed, says = MUTANTS[name]
    plan = {key: kind for key, kind in {**PLAN, **changed}.items() if kind != "whole"}
    tokens = torch.randint(0, 51, (2, 5))
    model = Mixed()
    with pytest.raises(ValueError) as caught:
        try_plan(model, cut_by(plan), 2, blocks=[], given=tokens)
    assert says in str(caught.value)
    assert "2 ranks, equal" in try_plan(model, cut_by(PLAN), 2, blocks=[], given=tokens)


def cut_by(plan: Any, sequence_parallel: bool = False) -> Any:
    def cut(part: nn.Module, group: Any) -> None:
        options = {"sequence_parallel": sequence_parallel, "gather_logits": True, "complete": False}
        replace_layers(part, ReplacementPlan(part, group, plan, **options))

    return cut


FAMILIES: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {},
    "BloomForCausalLM": {},
    "StableLmForCausalLM": {},
    "OlmoForCausalLM": {},
    "GraniteForCausalLM": {},
    "RobertaForMaskedLM": {},
    "XLMRobertaForMaskedLM": {},
    "CamembertForMaskedLM": {},
    "ElectraForMaskedLM": {},
    "DistilBertForMaskedLM": {},
    "EsmForMaskedLM": {"vocab_size": 33},
    "BartForConditionalGeneration": {},
    "WhisperForConditionalGeneration": {},
    "DeiTForImageClassification": {},
    "Dinov2ForImageClassification": {},
    "CLIPModel": {},
    "BioGptForCausalLM": {},
    "BertForMultipleChoice": {},
}


# Families whose blocks are those of another one of the list, or of one in existing_models.py.
ALIKE = {
    "GemmaForCausalLM", "Gemma2ForCausalLM", "StableLmForCausalLM", "OlmoForCausalLM",
    "GraniteForCausalLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM", "ElectraForMaskedLM",
    "DeiTForImageClassification", "BioGptForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize("name", [full(name) if name in ALIKE else name for name in FAMILIES])
def test_families_have_plans_that_hold(name: str):
    """With tokens shared out, which has all that is there without, on virtual ranks. GQA, tied
    embeddings, fused layouts."""
    model = tiny(name, **FAMILIES[name])
    plan = plan_of(model)
    blocks = [
        each
        for each, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and "ayer" in each
    ]
    told = try_plan(model, cut_by(plan, True), 2, blocks=blocks)
    assert float(told.partition("model to ")[2].partition(";")[0]) < 1e-9


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("FalconForCausalLM", {"multi_query": False, "num_kv_heads": 4}),
        ("Phi3ForCausalLM", {"num_key_value_heads": 4}),
        ("LlamaForCausalLM", {"num_key_value_heads": 1}),
        ("GPTNeoXForCausalLM", {"num_attention_heads": 3, "hidden_size": 12}),
        ("BloomForCausalLM", {"n_head": 3, "hidden_size": 12}),
        ("GemmaForCausalLM", {"tie_word_embeddings": False}),
    ],
)
def test_heads_of_other_numbers(name: str, changed: dict[str, Any]):
    """Heads that the ranks do not divide, key-value heads fewer than the ranks, bias by distance,
    untied heads."""
    model = tiny(name, **changed)
    told = try_plan(model, cut_by(plan_of(model)), 2, blocks=[])
    assert float(told.partition("model to ")[2].partition(";")[0]) < 1e-9


def test_what_can_not_be_checked():
    with pytest.raises(ValueError, match="no inputs can be made up for it: pass example_inputs="):
        parallelize(Mixed(), plan=PLAN)
    with pytest.raises(ValueError, match="example_inputs is int; pass a tensor, a tuple"):
        parallelize(Mixed(), plan=PLAN, example_inputs=3)
    with pytest.raises(ValueError, match="that failed: "):
        parallelize(Mixed(), plan=PLAN, example_inputs=torch.tensor([[500]]))
    assert parallelize(Mixed(), plan=PLAN, check=False).checked == "nothing, with check=False"
    with torch.device("meta"):
        model = tiny("LlamaForCausalLM")
    assert "on the meta device" in parallelize(model).checked


def test_a_plan_is_tried_on_the_cpu_whatever_the_default_device_is():
    """Here one whose tensors have no values, so that nothing could be found equal."""
    model, tokens = tiny("GPT2LMHeadModel"), torch.randint(0, 51, (2, 5))
    with torch.device("meta"):
        told = try_plan(model, cut_by(plan_of(model)), 2, blocks=[], given=tokens)
    assert "2 ranks, equal" in told


def test_parameters_without_elements_are_tried_too():
    model = Mixed()
    model.nothing = nn.Parameter(torch.empty(0, 4))
    told = try_plan(model, cut_by(PLAN), 2, blocks=[], given=torch.randint(0, 51, (2, 5)))
    assert "2 ranks, equal" in told


class Switched(nn.Module):
    """A block whose plan is right only while `normalized` is off: then the norm is over all of the
    inner width."""

    def __init__(self, *, normalized: bool) -> None:
        super().__init__()
        self.up, self.down, self.normalized = nn.Linear(8, 12), nn.Linear(12, 8), normalized

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x).relu()
        out: torch.Tensor = x + self.down(
            inner / inner.norm(dim=-1, keepdim=True) if self.normalized else inner
        )
        return out


def _tried_switch(rank: int, group: Any, normalized: bool) -> str:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(
        "layers",
        nn.Sequential(*(Switched(normalized=normalized and number == 2) for number in range(3))),
    )
    plan = {"layers": "blocks", "up": "columns", "down": "rows"}
    try:
        parallelize(model, group=group, plan=plan, example_inputs=torch.ones(2, 8))
    except ValueError as error:
        return str(error)
    return "cut"


def test_a_third_block_that_differs_in_a_switch_alone_is_tried_too(world):
    assert world(2).run(_tried_switch, False) == ["cut", "cut"]
    assert all("differs" in text for text in world(2).run(_tried_switch, True))


def _in_little_memory(rank: int, group: Any) -> str:
    inner = trial_copy.free_memory
    trial_copy.free_memory = lambda: 100  # of a container, say
    try:
        return _tried_switch(rank, group, False)
    finally:
        trial_copy.free_memory = inner


def test_a_check_that_does_not_fit_into_the_memory_is_not_begun(world):
    assert all("GiB are free" in text for text in world(2).run(_in_little_memory))


def test_the_trial_takes_two_copies_of_what_it_tries(monkeypatch):
    """The parts, and gradients of half their bytes twice: not the uncut copy besides, nor another
    for each rank."""
    width = 512
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    copy_bytes = 8 * sum(p.numel() for p in model.parameters())
    seen, narrow = [], trial_run._narrow

    def noting(*args: Any) -> Any:
        hook = narrow(*args)

        def after(p: torch.Tensor) -> None:
            hook(p)
            seen.append(allocated())

        return after

    def cut(part: nn.Module, ranks: Any) -> None:
        kinds = {"0": "columns", "2": "rows"}
        replaced = ReplacementPlan(
            part, ranks, kinds, sequence_parallel=False, gather_logits=True, complete=False
        )
        replace_layers(part, replaced)

    monkeypatch.setattr(trial_run, "_narrow", noting)
    before = allocated()
    try_plan(model, cut, 2, blocks=[], given=torch.randn(2, width))
    assert len(seen) >= 3 * 4
    assert 1.5 * copy_bytes < max(seen) - before < 2.7 * copy_bytes
