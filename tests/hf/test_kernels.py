"""pyops.hf.apply_kernels: a model of transformers beside itself with fused norms, MLPs, activations
and loss."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import io
import pickle
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.hf import apply_kernels, kernels, remove_kernels
from pyops.ops.library import build_info
from tests.hf.tiny_transformers import (
    ALL,
    DECODER,
    LENGTH,
    VOCABULARY,
    assert_no_worse,
    batch,
    exact,
    logits_and_gradients,
    made,
)
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.cpu_only

MODELS = {
    "LlamaForCausalLM": {"rms_norm": 5, "gated_mlp": 2},
    "Qwen3ForCausalLM": {"rms_norm": 9, "gated_mlp": 2},
    "Phi3ForCausalLM": {"rms_norm": 5, "merged_gated_mlp": 2},
    "GemmaForCausalLM": {"rms_norm": 5, "gated_mlp": 2},
    "Olmo2ForCausalLM": {"rms_norm": 9, "gated_mlp": 2},
    "GPT2LMHeadModel": {"layer_norm": 5, "gelu_tanh": 2},
    "BertForMaskedLM": {"layer_norm": 6, "gelu": 3},
    "T5ForConditionalGeneration": {"rms_norm": 12, "gated_mlp": 4},
}


def counts(report: dict[str, str]) -> dict[str, int]:
    done = list(report.values())
    return {kind: done.count(kind) for kind in kernels.OPS if kind in done}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_before(name):
    model = made(name)
    assert counts(apply_kernels(copy.deepcopy(model), kinds=ALL)) == MODELS[name]
    reference = logits_and_gradients(exact(model))
    wide = copy.deepcopy(model).double()
    apply_kernels(wide, kinds=ALL)
    found = logits_and_gradients(wide)
    # Rotary tables are float32 in both, and some softmaxes.
    limit = 1e-8 * max(float(x.abs().max()) for x in reference.values())
    for key, wanted in reference.items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-6, atol=limit)
    for dtype in (torch.float32, torch.bfloat16):
        plain = copy.deepcopy(model).to(dtype)
        fused = copy.deepcopy(plain)
        apply_kernels(fused, kinds=ALL)
        expected = logits_and_gradients(exact(plain))
        assert_no_worse(logits_and_gradients(fused), logits_and_gradients(plain), expected)


def test_float64_models_of_layer_norms_agree_to_their_last_digits():
    for name in ("GPT2LMHeadModel", "BertForMaskedLM"):
        plain = made(name).double()
        fused = copy.deepcopy(plain)
        apply_kernels(fused, kinds=ALL)
        found, wanted = logits_and_gradients(fused), logits_and_gradients(plain)
        limit = 1e-13 * max(float(x.abs().max()) for x in wanted.values())
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=limit)


PARTS = {
    "llama.LlamaRMSNorm": (32,),
    "gemma.GemmaRMSNorm": (32,),
    "olmo2.Olmo2RMSNorm": (32,),
    "t5.T5LayerNorm": (32,),
    "llama.LlamaMLP": "llama.LlamaConfig",
    "phi3.Phi3MLP": "phi3.Phi3Config",
    "t5.T5DenseGatedActDense": "t5.T5Config",
}


@pytest.mark.parametrize("path", PARTS)
def test_a_part_is_as_exact_as_its_own_forward(path):
    given, (folder, name) = PARTS[path], path.split(".")
    torch.manual_seed(0)
    cls = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    if isinstance(given, str):
        import transformers

        options = {
            **DECODER,
            "d_model": 32,
            "d_ff": 48,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
        }
        part = cls(getattr(transformers, given.split(".")[1])(**options))
    else:
        part = cls(*given, eps=0.03)
    with torch.no_grad():
        for p in part.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    for dtype in (torch.float32, torch.bfloat16):
        plain = part.to(dtype)
        fused = copy.deepcopy(plain)
        assert len(counts(apply_kernels(fused, kinds=ALL))) == 1
        wide = exact(nn.Sequential(plain))
        x, seed = torch.randn(40, 32).to(dtype), torch.randn(40, 32).to(dtype)
        found, expected, wanted = (
            _outputs(each, x.to(kind), seed.to(kind))
            for each, kind in ((fused, dtype), (plain, dtype), (wide, torch.float64))
        )
        for ours, theirs, reference in zip(found, expected, wanted, strict=True):
            # Products of matrices are torch's, of factors that are rounded otherwise.
            worst = (theirs.double() - reference).abs().max()
            assert_close_to_reference(ours, reference + worst, reference)


def _outputs(module: nn.Module, x: Tensor, seed: Tensor) -> list[Tensor]:
    """A module's output and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(seed)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


# --- what is swapped


def test_only_what_is_worth_it_is_swapped_by_default():
    if not build_info()["extension"]:
        report = apply_kernels(made("LlamaForCausalLM"))
        assert all(
            done == "left: no kernel for cpu in this installation" for done in report.values()
        )
        return
    worth = {kind for kind, (swapped, _) in kernels.WORTH_IT["cpu"].items() if swapped}
    # An MLP that stays calls its activation, which may be worth it.
    alone = {"GemmaForCausalLM": {"gelu_tanh": 2}, "T5ForConditionalGeneration": {"gelu_tanh": 4}}
    for name, known in MODELS.items():
        report = apply_kernels(made(name))
        all_known = known | alone.get(name, {})
        assert counts(report) == {kind: n for kind, n in all_known.items() if kind in worth}
        left = [done for done in report.values() if done.startswith("left: ")]
        assert all("not worth it on cpu: " in done for done in left)
    assert set(kernels.WORTH_IT["cpu"]) == set(kernels.WORTH_IT["cuda"]) == set(kernels.OPS)


def test_the_report_names_modules_and_what_was_done():
    report = apply_kernels(made("LlamaForCausalLM"), kinds=["rms_norm"], fused_loss=True)
    layer = {
        "input_layernorm": "rms_norm",
        "post_attention_layernorm": "rms_norm",
        "mlp": "left: not among kinds",
        "mlp.act_fn": "left: not among kinds",
    }
    layers = {f"model.layers.{n}.{key}": done for n in range(2) for key, done in layer.items()}
    assert report == {"": "linear_cross_entropy", "model.norm": "rms_norm", **layers}


def forward_of(path: str) -> str:
    """The statements of a forward of transformers, without its docstring."""
    folder, _, name = path.partition(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    source = inspect.getsource(inspect.unwrap(getattr(module, name).forward))
    function = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(function, ast.FunctionDef)
    statements = [
        each
        for each in function.body
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]
    return "\n".join(ast.unparse(each) for each in statements)


def test_the_classes_of_a_row_have_one_forward():
    """Of this version of transformers: where one changes, its row must be looked at."""
    for names in (*kernels.NORMS.values(), *kernels.MLPS.values(), kernels.CAUSAL):
        first, *others = [(path, forward_of(path)) for path in names.split()]
        assert len(first[1].splitlines()) > 1
        for path, found in others:
            assert found == first[1], path


def test_models_on_meta_take_kernels():
    with torch.device("meta"):
        model = made("LlamaForCausalLM")
        report = apply_kernels(model, kinds=ALL)
        assert counts(report) == MODELS["LlamaForCausalLM"]
        assert model(batch()["input_ids"].to("meta")).logits.shape == (3, LENGTH, VOCABULARY)


# --- what stays


def test_removing_restores_the_bits_and_copies_are_apart():
    model = made("Qwen3ForCausalLM")
    names, before = list(model.state_dict()), logits_and_gradients(model)
    parameters = dict(model.named_parameters())
    report = apply_kernels(model, kinds=ALL, fused_loss=True)
    assert list(model.state_dict()) == names
    assert all(p is parameters[name] for name, p in model.named_parameters())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    # Through the copy's own parameters.
    again = copy.deepcopy(made("Qwen3ForCausalLM"))
    apply_kernels(again, kinds=ALL)
    found, wanted = logits_and_gradients(copied), logits_and_gradients(again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    removed = remove_kernels(copied)
    assert sorted(removed) == sorted(n for n, done in report.items() if "left" not in done)
    assert all(torch.equal(x, before[n]) for n, x in logits_and_gradients(copied).items())
    assert not any("forward" in vars(module) for module in copied.modules())
    assert remove_kernels(copied) == []


def test_models_with_kernels_and_their_states_can_be_pickled():
    model = made("LlamaForCausalLM")
    apply_kernels(model, kinds=ALL, fused_loss=True)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = made("LlamaForCausalLM")
    other.load_state_dict(torch.load(file))
    assert torch.equal(
        logits_and_gradients(pickle.loads(pickle.dumps(model)))["logits"],
        logits_and_gradients(model)["logits"],
    )


def test_modules_with_hooks_are_left_alone():
    model = made("LlamaForCausalLM")
    seen: list[str] = []
    layers = model.model.layers
    model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    layers[0].input_layernorm.register_full_backward_hook(lambda *_: seen.append("back"))
    layers[0].mlp.act_fn.register_forward_hook(lambda *_: seen.append("act"))
    layers[1].mlp.forward = lambda x: 0 * x
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append("head"))
    report = apply_kernels(model, kinds=ALL, fused_loss=True)
    hooked = "left: it has hooks, or a forward of its own"
    assert report["model.norm"] == report["model.layers.0.input_layernorm"] == hooked
    assert report["model.layers.1.mlp"] == report["model.layers.0.mlp.act_fn"] == hooked
    inside = "left: a module within it, which would not be called, has hooks"
    assert report["model.layers.0.mlp"] == inside
    assert report[""] == "left: its head or its loss is not the usual one"
    assert report["model.layers.1.input_layernorm"] == "rms_norm"
    logits_and_gradients(model)
    assert sorted(seen) == ["act", "back", "head", "norm"]


def test_hooks_that_come_later_run():
    model = made("LlamaForCausalLM").train()
    apply_kernels(model, kinds=ALL, fused_loss=True)
    seen: list[str] = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: seen.append("act"))
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append("head"))
    assert model(**batch()).logits is not None
    assert seen == ["act", "head"]


def test_other_models_of_the_process_are_untouched():
    plain, fused = made("LlamaForCausalLM"), made("LlamaForCausalLM")
    before = logits_and_gradients(plain)
    apply_kernels(fused, kinds=ALL, fused_loss=True)
    assert all(torch.equal(x, before[name]) for name, x in logits_and_gradients(plain).items())


def test_what_cannot_take_kernels_is_refused_before_anything_changes():
    from pyops.mesh import ALONE
    from pyops.tensor_parallel import RMSNorm

    with pytest.raises(TypeError, match=r"model is a dict; give a torch\.nn\.Module"):
        apply_kernels({})
    with pytest.raises(ValueError, match="kinds has 'rms'; there are rms_norm, layer_norm"):
        apply_kernels(nn.LayerNorm(4), kinds=["rms"])
    with pytest.raises(ValueError, match="kinds is 'rms_norm'; give a collection"):
        apply_kernels(nn.LayerNorm(4), kinds="rms_norm")
    model = nn.Sequential(nn.LayerNorm(4), RMSNorm(4, group=ALONE))
    with pytest.raises(ValueError, match="module '1' is a part of a larger one"):
        apply_kernels(model, kinds=ALL)
    assert remove_kernels(model) == []


# --- beside PEFT, checkpointing, autocast and torch.compile


@pytest.mark.parametrize("first", ["adapters", "kernels"])
def test_adapters_within_an_mlp_are_called(first):
    import peft

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config)

    plain, fused = adapted(made("LlamaForCausalLM")).double(), made("LlamaForCausalLM")
    if first == "kernels":
        apply_kernels(fused, kinds=["gated_mlp"], fused_loss=True)
        fused = adapted(fused).double()
    else:
        fused = adapted(fused).double()
        report = apply_kernels(fused, kinds=["gated_mlp"], fused_loss=True)
        assert report["base_model.model.model.layers.1.mlp"] == "gated_mlp"
        assert report["base_model.model"] == "linear_cross_entropy"
    wanted = logits_and_gradients(plain)
    found = logits_and_gradients(fused)
    assert sum("lora" in name for name in wanted) == 12
    assert set(found) == set(wanted)
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-11 * float(x.abs().max()))
    assert fused.train()(**batch()).logits is None


def test_gradient_checkpointing_gives_the_same_bits():
    plain, saved = made("LlamaForCausalLM").train(), made("LlamaForCausalLM").train()
    for model in (plain, saved):
        apply_kernels(model, kinds=ALL, fused_loss=True)
    saved.gradient_checkpointing_enable()
    for model in (plain, saved):
        model(**batch(), use_cache=False).loss.backward()
    for p, q in zip(plain.parameters(), saved.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_results_have_the_dtype_of_before(name):
    for dtype in (torch.float32, torch.bfloat16):
        plain = made(name).to(dtype)
        for module in plain.modules():
            if type(module).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                x = torch.randn(2, 32)
                for given in (x, x.bfloat16(), x.half()):
                    before = module(given)
                    apply_kernels(module, kinds=ALL)
                    after = module(given)
                    assert after.dtype == before.dtype
                    torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)
                    remove_kernels(module)
        fused = copy.deepcopy(plain)
        apply_kernels(fused, kinds=ALL)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before, after = plain(**batch()).logits, fused(**batch()).logits
        assert after.dtype == before.dtype
        assert (after - before).abs().max() < 0.05 * before.abs().max()


@pytest.mark.full
def test_torch_compile_sees_one_graph():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    torch.manual_seed(0)
    config = LlamaConfig(**DECODER)
    block = nn.Sequential(LlamaRMSNorm(32, eps=0.03), LlamaMLP(config), nn.LayerNorm(32), nn.GELU())
    assert len(apply_kernels(block, kinds=ALL)) == 4
    x = torch.randn(5, 32)
    wanted = block(x)
    wanted.square().sum().backward()
    gradients = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    found = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    for p, g in zip(block.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_activations_of_torch_and_transformers_are_theirs():
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    given = [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")]
    names = ("gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_accurate", "silu")
    for module in (*given, *(ACT2FN[name] for name in names)):
        wanted = module(x)
        (done,) = apply_kernels(module, kinds=ALL).values()
        assert not done.startswith("left"), type(module).__name__
        torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)
    for module in (ACT2FN["quick_gelu"], ACT2FN["gelu_fast"], nn.Tanh()):
        assert apply_kernels(module, kinds=ALL) == {}


def test_an_mlp_of_t5_drops_out_what_it_did():
    plain = made("T5ForConditionalGeneration").encoder.block[0].layer[1].DenseReluDense.double()
    fused = copy.deepcopy(plain)
    assert apply_kernels(fused, kinds=ALL) == {"": "gated_mlp"}
    x, found = torch.randn(6, 32, dtype=torch.float64), []
    for module in (plain, fused):
        module.dropout.p = 0.5
        torch.manual_seed(5)
        found.append(module.train()(x))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found[0], plain.eval()(x))
