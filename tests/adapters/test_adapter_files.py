"""Adapters in the files of peft: what peft reads and writes, and on any number of ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pyops import hub
from pyops.adapters import LoRA, load, save
from pyops.models import GPT, GPTConfig
from tests.adapters.adapted import filled
from tests.models.families import make

pytestmark = pytest.mark.cpu_only

TOKENS = torch.arange(12).view(2, 6)
FAMILIES = ("llama", "gpt2")


def transformers_model(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=12,
        )
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=16, n_layer=2, n_head=4, n_positions=12, resid_pdrop=0, embd_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, folder, model of transformers)"""
    folder = tmp_path_factory.mktemp("base") / request.param
    model = transformers_model(request.param)
    model.save_pretrained(folder)
    return request.param, folder, model


@torch.no_grad()
def test_peft_reads_what_is_saved(base, tmp_path):
    """From a model of pyops, and from one of transformers with adapters of pyops."""
    peft = pytest.importorskip("peft")
    family, folder, _ = base
    model = hub.load(folder)
    lora = filled(model)
    save(lora, tmp_path / "ours", base=str(folder))
    expected = model(TOKENS)
    there = peft.PeftModel.from_pretrained(transformers_model(family), tmp_path / "ours").eval()
    torch.testing.assert_close(there(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    plain = hub.load(folder)(TOKENS)
    assert (expected - plain).abs().max() > 1e-2
    foreign = transformers_model(family)
    other = filled(foreign)
    save(other, tmp_path / "theirs")
    there = peft.PeftModel.from_pretrained(transformers_model(family), tmp_path / "theirs").eval()
    torch.testing.assert_close(there(TOKENS).logits, foreign(TOKENS).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_peft_saved_is_read(base, tmp_path):
    """Into a model of pyops, whose layers are several of the file's with factors of their own, and
    into one of transformers; then saved anew and read again."""
    peft = pytest.importorskip("peft")
    family, folder, _ = base
    targets = (
        ["k_proj", "v_proj", "up_proj", "gate_proj"] if family == "llama" else ["c_attn", "c_fc"]
    )
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets)
    wrapped = peft.get_peft_model(transformers_model(family), config).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.2)
    wrapped.save_pretrained(tmp_path / "peft")
    expected = wrapped(TOKENS).logits
    model = hub.load(folder)
    plain = model(TOKENS)
    lora = load(model, tmp_path / "peft")
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-5)
    foreign = transformers_model(family)
    load(foreign, tmp_path / "peft")
    torch.testing.assert_close(foreign(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    save(lora, tmp_path / "again")
    again = hub.load(folder)
    load(again, tmp_path / "again")
    torch.testing.assert_close(again(TOKENS), expected, rtol=1e-4, atol=1e-5)
    there = peft.PeftModel.from_pretrained(transformers_model(family), tmp_path / "again").eval()
    torch.testing.assert_close(there(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_ranks_and_scales_of_single_layers(base, tmp_path):
    """peft's rank_pattern and alpha_pattern: alpha / r of a layer is that of its own numbers."""
    peft = pytest.importorskip("peft")
    family, folder, _ = base
    first, second = ("k_proj", "up_proj") if family == "llama" else ("c_attn", "c_fc")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=[first, second],
        rank_pattern={first: 2},
        alpha_pattern={f"1.*{second}": 24},
    )
    wrapped = peft.get_peft_model(transformers_model(family), config).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.2)
    wrapped.save_pretrained(tmp_path / "peft")
    expected = wrapped(TOKENS).logits
    for model in (hub.load(folder), transformers_model(family)):
        lora = load(model, tmp_path / "peft")
        found = model(TOKENS)
        torch.testing.assert_close(getattr(found, "logits", found), expected, rtol=1e-4, atol=1e-5)
    save(lora, tmp_path / "again")
    there = peft.PeftModel.from_pretrained(transformers_model(family), tmp_path / "again").eval()
    torch.testing.assert_close(there(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


def saved(rank: int, group: Any, folder: str) -> None:
    save(filled(make("llama", group=group)), folder)


def loaded(rank: int, group: Any, folder: str) -> torch.Tensor:
    model = make("llama", group=group).eval()
    load(model, folder)
    with torch.no_grad():
        return model(TOKENS[:, :5])


@torch.no_grad()
def test_files_do_not_depend_on_the_ranks(world, tmp_path):
    """The same from two ranks as from one, the fingerprint among it."""
    model = make("llama").eval()
    save(filled(model), tmp_path / "one")
    world(2).run(saved, str(tmp_path / "two"))
    contents = []
    for name in ("one", "two"):
        with safe_open(tmp_path / name / "adapter_model.safetensors", "pt") as opened:
            names = list(opened.keys())
            contents.append(({n: opened.get_tensor(n) for n in names}, opened.metadata()))
    (one, marks), (two, other_marks) = contents
    assert marks == other_marks
    assert len(marks["pyops_base"]) == 16
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)
    for found in world(4).run(loaded, str(tmp_path / "one")):
        torch.testing.assert_close(found, model(TOKENS[:, :5]), rtol=0, atol=1e-5)


def test_another_base_is_refused(tmp_path):
    """By its values, whatever their dtype; adapters that were merged say nothing of it. Nothing is
    changed by what is refused."""
    lora = filled(make("gpt"))
    save(lora, tmp_path / "adapters")
    for dtype in (torch.float32, torch.bfloat16):
        assert load(make("gpt", dtype=dtype), tmp_path / "adapters").rank == 3
    other = make("gpt")
    with torch.no_grad():
        other.blocks[1].mlp.up.weight[3, 5] += 0.5
    with pytest.raises(ValueError, match="of a base with the fingerprint"):
        load(other, tmp_path / "adapters")
    assert not any("adapter" in name for name, _ in other.named_parameters())
    assert all(p.requires_grad for p in other.parameters())
    lora.merge()
    lora.unmerge()
    save(lora, tmp_path / "adapters")
    load(other, tmp_path / "adapters")


def test_a_model_that_no_class_of_transformers_computes(tmp_path):
    """Its layers keep their own names."""
    config = GPTConfig(
        vocab_size=13, sequence_length=5, num_layers=1, num_heads=2, dim=8, activation="swiglu"
    )
    model = GPT(config).eval()
    lora = filled(model)
    save(lora, tmp_path / "adapters")
    names = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert "base_model.model.blocks.0.mlp.up.lora_B.weight" in names
    again = GPT(config).eval()
    load(again, tmp_path / "adapters")
    assert torch.equal(again(TOKENS[:, :5]), model(TOKENS[:, :5]))


def test_damaged_files_are_refused(tmp_path):
    folder = tmp_path / "adapters"
    save(filled(make("gpt")), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")

    def refused(message: str) -> None:
        model = make("gpt")
        with pytest.raises(ValueError, match=message):
            load(model, folder)
        assert not any("adapter" in name for name, _ in model.named_parameters())

    def write(changes: dict[str, Any]) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))

    for changes, message in (
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"r": 0}, "r is 0; give a whole number, 1 or more"),
        ({"r": 2.5}, "r is 2.5"),
        ({"r": 2}, r"has r = 2 of .*c_attn, whose A has 3 rows: one of the two"),
        ({"rank_pattern": {"c_attn": 2}}, r"has r = 2 of .*c_attn, whose A has 3 rows"),
        ({"rank_pattern": {"c_attn": 0}}, "rank_pattern of c_attn is 0"),
        ({"alpha_pattern": [3]}, r"alpha_pattern is \[3\]; give an object"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; give a number above 0"),
        ({"lora_dropout": "x"}, "lora_dropout is 'x'; give a share"),
        ({"lora_bias": True}, "lora_bias = True; pyops has none"),
    ):
        write(changes)
        refused(message)
    write({})
    name = next(iter(tensors))
    path = folder / "adapter_model.safetensors"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, path)
    refused(r"which is \[")
    save_file({**tensors, name: torch.tensor(1.0)}, path)
    refused(r"which is \[")
    save_file({**tensors, name: tensors[name] * torch.nan}, path)
    refused("that are not finite")
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path)
    refused("torch.int8, that are not finite")
    save_file({**tensors, "base_model.model.other.lora_A.weight": torch.ones(1)}, path)
    refused("no such layer")
    path.write_bytes(path.read_bytes()[:-9])
    refused("are damaged")
    (folder / "adapter_config.json").write_text("[" * 100_000)
    refused("are damaged")
    path.unlink()
    refused("does not exist")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt"):
        save(filled(make("gpt")), folder)


def test_a_save_that_fails_leaves_nothing(tmp_path):
    """Beneath a file no folder can be made, as where a process may not write; and of adapters that
    are not finite nothing is written."""
    lora = filled(make("gpt"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"adapters.save: .*sub can't be written: Not a directory"):
        save(lora, tmp_path / "file" / "sub")
    save(lora, tmp_path / "adapters", base=tmp_path / "base")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    before = (tmp_path / "adapters" / "adapter_model.safetensors").read_bytes()
    next(lora.parameters()).data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"A of the adapter of .* has a number that is not finite"):
        save(lora, tmp_path / "adapters")
    with pytest.raises(TypeError, match="lora is a GPT; give the LoRA"):
        save(lora.model, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "file"]
    assert before == (tmp_path / "adapters" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("part", ["adapter.A", "adapter.B", "weight"])
def test_what_has_no_memory_is_refused_before_a_byte_is_written(tmp_path, part, merged):
    """As an optimizer leaves parameters that it has shared out; the save from before stays, whether
    or not a fingerprint of the base is asked for."""
    model = make("gpt")
    lora = filled(model)
    save(lora, tmp_path / "adapters")
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    lora.was_merged = merged
    name = f"blocks.1.mlp.up.{part}"
    held = model.get_parameter(name).data.untyped_storage()
    size, values = held.nbytes(), model.get_parameter(name).detach().clone()
    held.resize_(0)
    with pytest.raises(ValueError, match=rf"{name} has elements but no memory for them"):
        save(lora, tmp_path / "adapters")
    held.resize_(size)
    model.get_parameter(name).data.copy_(values)
    assert [path.name for path in tmp_path.iterdir()] == ["adapters"]
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}


def test_a_model_with_adapters_is_no_folder_of_its_base(tmp_path):
    """It is saved once they are merged."""
    model = make("llama").eval()
    lora = filled(model)
    with pytest.raises(hub.HubError, match="has adapters"):
        hub.save(model, tmp_path / "folder")
    expected = model(TOKENS[:, :5])
    lora.merge()
    lora.remove()
    hub.save(model, tmp_path / "folder")
    found = hub.load(tmp_path / "folder").eval()(TOKENS[:, :5])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_lora_of_a_folder_generates(tmp_path):
    """Generation computes with adapters, as the whole model does."""
    from pyops.models import generate

    model = make("llama").eval()
    lora: LoRA = filled(model)
    (row,) = generate(model, [[1, 2]], max_new=3, temperature=0)
    with torch.no_grad():
        for length in (2, 3, 4):
            text = torch.tensor([[1, 2, *row.tokens][:length]])
            assert int(model(text)[0, -1].argmax()) == row.tokens[length - 2]
    lora.merge()
