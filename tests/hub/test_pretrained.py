"""Models of transformers, made without memory, filled part by part and written back: bits, names,
memory, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pyops.hub import HubError
from pyops.hub.pretrained import (
    PretrainedWeights,
    empty_like_config,
    empty_model,
    save_pretrained,
    saving,
)
from tests.hub.pretrained_bodies import (
    MODELS,
    LiveMemory,
    as_stages,
    cut_over_ranks,
    fill_all,
    filled,
    give_memory,
    with_zero,
)

pytestmark = pytest.mark.cpu_only

SLOW = 240.0  # seconds; importing transformers on a busy machine
CUT = [name for name in MODELS if name != "mixtral"]  # for whose experts there is no plan
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model as transformers writes it, made once."""
    root = tmp_path_factory.mktemp("pretrained")
    for name, make in MODELS.items():
        make().eval().save_pretrained(root / name)
    return {name: root / name for name in MODELS}


def class_of(folder: Path) -> Any:
    return getattr(
        transformers, json.loads((folder / "config.json").read_text())["architectures"][0]
    )


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        held = load_file(path)
        assert not set(held) & set(found), "a tensor is in two files"
        found.update(held)
    return found


def assert_same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same_index(folder: Path) -> None:
    """transformers finds each tensor where the index says."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        assert files[0].name == WEIGHTS
        return
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_in(folder).values())


@pytest.mark.parametrize("name", MODELS)
def test_what_is_filled_is_what_transformers_loads(folders, name):
    reference = class_of(folders[name]).from_pretrained(folders[name])
    model = filled(folders[name])
    assert type(model) is type(reference)
    assert_same_tensors(dict(model.state_dict()), dict(reference.state_dict()))
    buffers, wanted = dict(model.named_buffers()), dict(reference.named_buffers())
    assert_same_tensors(buffers, wanted)
    tied = [n for n, _ in reference.named_parameters()]
    assert [n for n, _ in model.named_parameters()] == tied  # a tied one has one name
    assert model.training


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_without_memory_and_buffers_real(folders, name):
    size = sum(t.nbytes for t in tensors_in(folders[name]).values())
    with LiveMemory() as memory:
        model = empty_model(folders[name])
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert memory.peak < 0.05 * size + 2000, (memory.peak, size)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_the_peak_is_the_part_and_one_tensor(folders, name):
    held = tensors_in(folders[name])
    model = empty_model(folders[name])
    with PretrainedWeights(folders[name]) as weights, LiveMemory() as beside_the_part:
        weights.check(model)
        assert weights.bytes_read == beside_the_part.peak == 0
        give_memory(model)
        beside_the_part.restart()
        for module in model.modules():
            weights.fill(module)
        read = weights.bytes_read
    largest = max(t.nbytes for t in held.values())
    # Beside the tensor itself the numbers that aminmax gives.
    assert largest <= beside_the_part.peak <= largest + 64
    whole = sum(t.nbytes for t in held.values())
    assert whole <= read <= whole + 4 * largest  # a tied one for each module that has it


@pytest.fixture(scope="module")
def cut(world, folders, tmp_path_factory) -> dict[str, tuple[list[Any], Path]]:
    root = tmp_path_factory.mktemp("cut")
    return {
        name: (
            world(2).run(cut_over_ranks, str(folders[name]), str(root / name), timeout=SLOW),
            root / name,
        )
        for name in CUT
    }


@pytest.mark.parametrize("name", CUT)
def test_each_rank_has_its_part(folders, cut, name):
    reference = class_of(folders[name]).from_pretrained(folders[name])
    whole = dict(reference.named_parameters())
    conv1d = {n for n, m in reference.named_modules() if type(m).__name__ == "Conv1D"}
    num_cut = 0
    for of_rank in cut[name][0]:
        assert sorted(of_rank["values"]) == sorted(whole)
        for key, value in of_rank["values"].items():
            wanted, place = whole[key].detach(), of_rank["placements"].get(key)
            if place is not None:
                if key.rpartition(".")[0] in conv1d and wanted.dim() == 2:
                    wanted = wanted.t()
                wanted = place.take(wanted.reshape(place.global_shape))
                num_cut += place.dim is not None
            assert torch.equal(value, wanted), key
    assert num_cut > 16


@pytest.mark.parametrize("name", CUT)
def test_two_ranks_write_the_original_tensors(folders, cut, name):
    written = cut[name][1]
    assert len(list(written.glob("*.safetensors"))) > 1
    assert_same_tensors(tensors_in(written), tensors_in(folders[name]))
    assert_same_index(written)
    assert not written.with_name(written.name + ".tmp").exists()
    original = json.loads((folders[name] / "config.json").read_text())
    assert json.loads((written / "config.json").read_text()) == original


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_computes_the_same_bits(folders, cut, name):
    inputs = torch.arange(1, 8)[None]
    outputs = []
    for folder in (folders[name], cut[name][1]):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            outputs.append(model(input_ids=inputs).logits)
    assert torch.equal(*outputs)
    assert outputs[0].std() > 0.1


@pytest.mark.parametrize("name", ["llama", "llama, tied", "mixtral"])
def test_two_stages_write_the_original_tensors(world, folders, tmp_path, name):
    first, second = world(2).run(as_stages, str(folders[name]), str(tmp_path / "w"), timeout=SLOW)
    assert not set(first) & set(second)
    assert_same_tensors(tensors_in(tmp_path / "w"), tensors_in(folders[name]))
    assert_same_index(tmp_path / "w")
    assert len(list((tmp_path / "w").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(("name", "stage"), [("bert", 1), ("llama, tied", 3), ("gpt2", 3)])
def test_shards_of_zero_are_filled_and_saved(world, folders, tmp_path, name, stage):
    read = world(2).run(with_zero, str(folders[name]), str(tmp_path / "w"), stage, timeout=SLOW)
    whole = sum(t.nbytes for t in tensors_in(folders[name]).values())
    assert all(each >= whole for each in read)
    assert_same_tensors(tensors_in(tmp_path / "w"), tensors_in(folders[name]))


def test_16_bits_are_written_as_they_are_and_in_one_file(tmp_path):
    made = MODELS["llama"]().bfloat16()
    made.save_pretrained(tmp_path / "a")
    model = filled(tmp_path / "a")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    save_pretrained(model, tmp_path / "w")
    assert_same_tensors(tensors_in(tmp_path / "w"), tensors_in(tmp_path / "a"))
    assert json.loads((tmp_path / "w" / "config.json").read_text())["dtype"] == "bfloat16"
    again = transformers.AutoModel.from_pretrained(tmp_path / "w")
    assert again.dtype == torch.bfloat16


def test_a_mixture_of_experts_is_written_as_its_files_were(folders, tmp_path):
    save_pretrained(filled(folders["mixtral"]), tmp_path / "w", max_file_bytes=10_000)
    found = tensors_in(tmp_path / "w")
    assert any("experts.3.w1" in name for name in found)
    assert_same_tensors(found, tensors_in(folders["mixtral"]))
    assert_same_index(tmp_path / "w")


def test_a_base_model_gets_a_new_head(folders):
    values = json.loads((folders["bert"] / "config.json").read_text())
    config = transformers.BertConfig(**{**values, "num_labels": 3})
    model = empty_like_config(transformers.BertForSequenceClassification, config)
    base = {name: t for name, t in tensors_in(folders["bert"]).items() if "cls." not in name}
    with PretrainedWeights(folders["bert"]) as weights:
        with pytest.raises(HubError, match=r"lacks 4 .*pooler.*classifier\.weight.*allow_missing"):
            weights.check(model, allow_unused=True)
        with pytest.raises(HubError, match=r"has besides 5 .*cls\.predictions.*allow_unused"):
            weights.check(model, allow_missing=True)
        report = weights.check(model, allow_missing=True, allow_unused=True)
        fill_all(model, weights)
    assert sorted(report.new)[-2:] == ["classifier.bias", "classifier.weight"]
    assert all(name.startswith("cls.") for name in report.unused)
    state = model.state_dict()
    for name, tensor in base.items():
        assert torch.equal(state[name], tensor), name
    assert 0 < state["classifier.weight"].std() < 0.1
    assert not state["classifier.bias"].any()


def test_the_prefix_of_the_base_model_may_be_missing(folders, tmp_path):
    whole = class_of(folders["llama"]).from_pretrained(folders["llama"])
    whole.model.save_pretrained(tmp_path / "base")
    assert "embed_tokens.weight" in tensors_in(tmp_path / "base")
    model = empty_model(folders["llama"])
    with PretrainedWeights(tmp_path / "base") as weights:
        assert weights.check(model, allow_missing=True).new == ("lm_head.weight",)
        fill_all(model, weights)
    assert torch.equal(
        model.get_parameter("model.embed_tokens.weight"), whole.model.embed_tokens.weight
    )


# What is refused.


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(folders["llama, tied"], tmp_path / "f")
    return tmp_path / "f"


def changed(folder: Path, **tensors: Tensor | None) -> None:
    """Other tensors in the folder; None takes one away."""
    held = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})


def configured(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({NORM: None}, r"lacks 1 tensors \(model\.norm\.weight\).*allow_missing"),
        ({"model.extra": torch.ones(2)}, r"has besides 1 .*model\.extra.*allow_unused"),
        ({NORM: torch.ones(25)}, r"norm\.weight is \[25\] in .*model\.safetensors, but \[24\]"),
        ({NORM: torch.ones(24).to(torch.int8)}, r"norm\.weight is of I8 .*quantized"),
        ({NORM: torch.full((24,), torch.nan)}, r"norm\.weight in .*model\.safetensors has a NaN"),
        ({NORM: torch.full((24,), -torch.inf)}, r"norm\.weight in .* has a NaN or Inf"),
        ({"lm_head.weight": torch.ones(51, 24)}, r"lm_head\.weight in .* differs from .*embed"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(folder, tensors, words):
    changed(folder, **tensors)
    with pytest.raises(HubError, match=words):
        filled(folder)


def test_one_nan_of_a_large_tensor_is_found(folder):
    weight = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    weight[-1, -1] = torch.nan
    changed(folder, **{"model.embed_tokens.weight": weight})
    with pytest.raises(HubError, match=r"embed_tokens\.weight in .* has a NaN"):
        filled(folder)


def test_numbers_that_the_models_dtype_does_not_have_are_refused(folder):
    changed(folder, **{NORM: torch.full((24,), 1e5)})
    model = empty_model(folder, dtype="float16")
    with PretrainedWeights(folder) as weights:
        weights.check(model)
        with pytest.raises(HubError, match=r"norm\.weight in .* has 100000, which is Inf in .*16"):
            fill_all(model, weights)


def test_what_says_nothing_is_ignored(folder):
    weight = load_file(folder / WEIGHTS)["model.embed_tokens.weight"].clone()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
        "lm_head.weight": weight,
    }
    changed(folder, **extra)
    model: Any = filled(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_file_that_was_cut_short_is_named(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(HubError, match=r"model\.safetensors is missing, damaged or cut short"):
        PretrainedWeights(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": None}, "architectures = None, and no class"),
        ({"architectures": ["LlamaForNothing"]}, "LlamaForNothing, which transformers .* does not"),
        ({"architectures": ["LlamaConfig"]}, "LlamaConfig, which transformers .* does not"),
        (
            {"architectures": ["Mine"], "auto_map": {"AutoModel": "modeling_mine.Mine"}},
            r"wants Mine from code of the folder's own \(auto_map: modeling_mine\.Mine\)",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .*not quantized"),
        ({"hidden_size": "wide"}, "makes no LlamaConfig"),
        ({"num_attention_heads": 0}, "config"),
    ],
)
def test_configurations_that_make_no_model_are_refused(folder, values, words):
    configured(folder, **values)
    with pytest.raises(HubError, match=words):
        empty_model(folder)


def test_a_field_that_a_config_does_not_have_is_refused(folder):
    with pytest.raises(ValueError, match=r"LlamaConfig has no \['hidden_sizes'\]; it has"):
        empty_model(folder, hidden_sizes=3)


def test_a_folder_without_a_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(HubError, match=r"config\.json does not exist"):
        empty_model(folder)


def test_a_module_that_was_not_checked_is_refused(folder):
    with PretrainedWeights(folder) as weights, pytest.raises(HubError, match="check"):
        weights.fill(nn.Linear(2, 2))


def test_a_killed_save_leaves_the_old_folder_whole(folder, tmp_path, monkeypatch):
    model = filled(folder)
    save_pretrained(model, tmp_path / "w", tokenizer_from=folder)
    before = tensors_in(tmp_path / "w")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)

    def killed(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", killed)
    with pytest.raises(HubError, match="can't be written: No space left"):
        save_pretrained(model, tmp_path / "w")
    assert_same_tensors(tensors_in(tmp_path / "w"), before)
    monkeypatch.undo()
    save_pretrained(model, tmp_path / "w")
    assert torch.equal(tensors_in(tmp_path / "w")[NORM], before[NORM] + 1)


def test_a_folder_with_something_else_is_not_replaced(folder, tmp_path):
    model = filled(folder)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "notes.txt").write_text("mine")
    with pytest.raises(HubError, match=r"holds notes\.txt"):
        save_pretrained(model, tmp_path / "w")
    with pytest.raises(HubError, match="is no model of transformers"):
        save_pretrained(nn.Linear(2, 2), tmp_path / "v")
    with pytest.raises(HubError, match="on the meta device"):
        save_pretrained(empty_model(folder), tmp_path / "v")


def test_the_files_of_a_tokenizer_go_along(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    save_pretrained(filled(folder), tmp_path / "w", tokenizer_from=folder)
    assert (tmp_path / "w" / "tokenizer.json").read_text() == "{}"
