"""Folders that pyops writes and reads itself: only what a rank holds is read, files are split, and
what is wrong is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyops import hub
from pyops.checkpoint import CheckpointError
from pyops.checkpoint import load as load_checkpoint
from pyops.checkpoint.convert import import_weights
from pyops.data import CorpusError, DataConfig
from pyops.data.corpus import find_documents
from pyops.hub.folder_files import open_weights, read_config
from pyops.hub.folder_loading import load_from
from pyops.models import BERT, GPT, T5, BERTConfig, GPTConfig, T5Config, ViT, ViTConfig
from pyops.tensor_parallel import Ranks

pytestmark = pytest.mark.cpu_only

LLAMA = GPTConfig(
    vocab_size=20,
    sequence_length=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    dim=8,
    hidden=12,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    tied_head=False,
    bias=False,
)
GPT2 = GPTConfig(
    vocab_size=20, sequence_length=8, num_layers=2, num_heads=4, dim=8, activation="gelu_tanh"
)
MODELS = [
    (GPT, GPT2),
    (GPT, LLAMA),
    (BERT, BERTConfig(vocab_size=20, sequence_length=8, num_layers=1, num_heads=2, dim=8)),
    (T5, T5Config(vocab_size=20, num_layers=1, num_heads=2, dim=8)),
    (
        T5,
        T5Config(
            vocab_size=20,
            num_layers=1,
            num_heads=2,
            dim=8,
            tied_head=False,
            scaled_head=False,
            activation="gated_gelu",
            num_decoder_layers=2,
        ),
    ),
    (ViT, ViTConfig(num_labels=3, image_size=4, patch_size=2, num_layers=1, num_heads=2, dim=8)),
    (GPT, replace(LLAMA, pattern="BigBird(seed=4) | SlidingWindow(num_sliding_window_blocks=5)")),
    (
        BERT,
        BERTConfig(
            vocab_size=20,
            sequence_length=8,
            num_layers=1,
            num_heads=2,
            dim=8,
            pattern="Longformer",
            pattern_block=32,
        ),
    ),
]


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    found, wanted = dict(model.named_parameters()), dict(other.named_parameters())
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hub.save(GPT(LLAMA, seed=1), tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(folder: Path, change: Any) -> None:
    """Write the folder's tensors anew after change(tensors)."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def tell(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), **fields})
    )


@pytest.mark.parametrize(
    ("kind", "config"), MODELS, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_ours_comes_back(tmp_path, kind, config, dtype):
    model = kind(config, seed=3, dtype=dtype)
    assert hub.save(model, tmp_path / "m") == ["config.json", "model.safetensors"]
    again = hub.load(tmp_path / "m")
    assert same(again, model)
    assert not again.training
    assert again.config.resolved() == config.resolved()
    wide = hub.load(tmp_path / "m", dtype=torch.float64)
    assert all(
        torch.equal(p, q.double())
        for p, q in zip(wide.parameters(), model.parameters(), strict=True)
    )


def held_and_read(rank: int, group: Any, folder: str) -> tuple[int, int]:
    with open_weights(folder) as weights:
        model = load_from(weights, read_config(folder), group=Ranks.of(group))
        return sum(p.numel() * p.element_size() for p in model.parameters()), weights.bytes_read


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_rank_reads_what_it_holds_and_no_more(world, tmp_path, config):
    hub.save(GPT(config), tmp_path / "m")
    whole, read = held_and_read(0, None, str(tmp_path / "m"))
    assert read == whole
    for held, read in world(2).run(held_and_read, str(tmp_path / "m")):
        assert read == held < 0.7 * whole


def test_files_of_at_most_so_many_bytes(world, tmp_path):
    model = GPT(LLAMA, seed=1)
    files = hub.save(model, tmp_path / "m", max_file_bytes=1500)
    assert len(files) > 4
    assert files[1] == f"model-00001-of-{len(files) - 1:05}.safetensors"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    sizes = {
        file: sum(t.numel() * 4 for t in load_file(tmp_path / "m" / file).values())
        for file in files[1:]
    }
    assert max(sizes.values()) <= 1500
    assert (
        index["metadata"]["total_size"]
        == sum(sizes.values())
        == sum(p.numel() * 4 for p in model.parameters())
    )
    assert all(
        name in load_file(tmp_path / "m" / file) for name, file in index["weight_map"].items()
    )
    assert same(hub.load(tmp_path / "m"), model)
    world(2).run(write_split, str(tmp_path / "m"), str(tmp_path / "n"))
    for file in files:
        assert (tmp_path / "n" / file).read_bytes() == (tmp_path / "m" / file).read_bytes(), file


def write_split(rank: int, group: Any, folder: str, to: str) -> None:
    hub.save(hub.load(folder, group=group), to, group=group, max_file_bytes=1500)


def test_spellings_of_other_versions(tmp_path, folder):
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {name.removeprefix("model."): tensors.pop(name) for name in list(tensors)}
            | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
        ),
    )
    tell(folder, rope_parameters=None)  # the base stands beside it
    assert same(hub.load(folder), GPT(LLAMA, seed=1))
    bert = BERT(MODELS[2][1], seed=2)
    hub.save(bert, tmp_path / "bert")
    rewrite(
        tmp_path / "bert",
        lambda tensors: tensors.update(
            {
                n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                    "LayerNorm.bias", "LayerNorm.beta"
                ): tensors.pop(n)
                for n in list(tensors)
            }
            | {
                "bert.embeddings.position_ids": torch.arange(8)[None],
                "cls.predictions.decoder.weight": bert.embedding.token.weight.detach().clone(),
            }
        ),
    )
    assert same(hub.load(tmp_path / "bert"), bert)


def test_fields_of_the_configuration_can_be_changed(folder):
    assert hub.load(folder, dropout=0.25).config.dropout == 0.25
    with pytest.raises(ValueError, match=r"GPTConfig has no \['droput'\]; it has .*dropout"):
        hub.load(folder, droput=0.25)


def test_other_fields_of_config_json_are_taken_over(tmp_path, folder):
    tell(folder, bos_token_id=7, hidden_size=999)
    hub.save(GPT(LLAMA), tmp_path / "m", like=folder)
    told = read_config(tmp_path / "m")
    assert (told["bos_token_id"], told["hidden_size"]) == (7, 8)
    with pytest.raises(hub.HubError, match="is of model_type 'llama', this model is a gpt2"):
        hub.save(GPT(GPT2), tmp_path / "n", like=folder)


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(hub.HubError, match=message):
        hub.load(folder, **options)


def test_an_architecture_that_is_not_known(folder):
    tell(folder, architectures=["MambaForCausalLM"], model_type="mamba")
    refused(
        folder,
        r"'MambaForCausalLM'.*not known; known are GPT2LMHeadModel \(gpt2\), "
        r"LlamaForCausalLM \(llama\), BertFor",
    )
    tell(folder, architectures=["LlamaForSequenceClassification"], model_type="llama")
    refused(folder, "'LlamaForSequenceClassification'.*not known")


def test_missing_and_unexpected_tensors(folder):
    def change(tensors: dict[str, Any]) -> None:
        tensors["extra.weight"] = tensors.pop("model.norm.weight")

    rewrite(folder, change)
    refused(
        folder,
        r"lack 1 tensors \(model.norm.weight\) and have besides 1 tensors "
        r"\(extra.weight\) of LlamaForCausalLM",
    )


def test_a_tensor_of_another_shape(folder):
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(21, 8)}))
    refused(folder, r"lm_head.weight is \[21, 8\] in the files, but \[20, 8\] by config.json")


def test_a_copy_that_is_none(tmp_path):
    model = GPT(GPT2, seed=1)
    hub.save(model, tmp_path / "m")
    rewrite(
        tmp_path / "m", lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()})
    )
    assert same(hub.load(tmp_path / "m"), model)
    rewrite(tmp_path / "m", lambda t: t["lm_head.weight"][3].add_(1.0))
    refused(
        tmp_path / "m",
        "lm_head.weight differs from transformer.wte.weight, but config.json ties them",
    )
    rewrite(tmp_path / "m", lambda t: t.update({"lm_head.weight": torch.zeros(2, 2)}))
    refused(
        tmp_path / "m",
        r"lm_head.weight is \[2, 2\], and transformer.wte.weight, whose copy it should "
        r"be, \[20, 8\]",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', pyops computes 'silu' only"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"mlp_bias": True}, "attention_bias = False and mlp_bias = True"),
        ({"hidden_size": None}, "hidden_size = None; it must be a whole number"),
    ],
)
def test_what_is_not_computed_is_refused(folder, fields, message):
    tell(folder, **fields)
    refused(folder, message)


def test_damaged_files_are_named(tmp_path, folder):
    whole = (folder / "model.safetensors").read_bytes()
    for bytes_ in (whole[:-5], whole[:30], b""):
        (folder / "model.safetensors").write_bytes(bytes_)
        refused(folder, r"model.safetensors is missing, damaged or cut short")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(
        folder,
        "no folder with model.safetensors.*; pytorch_model.bin is a pickle, which is not read",
    )
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is damaged|no folder with")
    hub.save(GPT(LLAMA), tmp_path / "m", max_file_bytes=3000)
    (tmp_path / "m" / "config.json").rename(tmp_path / "aside")
    refused(tmp_path / "m", "config.json does not exist; name a folder that save_pretrained")
    (tmp_path / "aside").rename(tmp_path / "m" / "config.json")
    (tmp_path / "m" / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path / "m", "model-00002-of-00002.safetensors is missing")


def test_a_name_of_the_hub_is_told_from_a_folder(tmp_path, monkeypatch):
    """Nothing is fetched; the message says how to. A path with a slip of the pen gets no such
    hint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    named = 'huggingface_hub.snapshot_download("openai-community/gpt2"'
    for name in ("openai-community/gpt2", "gpt2"):
        with pytest.raises(
            hub.HubError, match=re.escape(f'huggingface_hub.snapshot_download("{name}") returns')
        ):
            hub.load(name)
    with pytest.raises(hub.HubError, match=re.escape(named)):
        read_config("openai-community/gpt2")
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load_checkpoint("openai-community/gpt2")
    with pytest.raises(CheckpointError, match=re.escape(named)):
        import_weights("openai-community/gpt2", tmp_path / "c")
    with pytest.raises(CorpusError, match=re.escape(named + ', repo_type="dataset")')):
        find_documents(DataConfig(path="openai-community/gpt2"))
    for path in ("runs/gpt", str(tmp_path / "gpt"), "a/b/c"):
        with pytest.raises(hub.HubError) as caught:
            hub.load(path)
        assert "snapshot_download" not in str(caught.value), path


def test_files_of_several_dtypes(folder):
    rewrite(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].half()})
    )
    refused(folder, r"the files hold \['torch.float16', 'torch.float32'\]; name the dtype")
    assert hub.load(folder, dtype=torch.float16).head.output.weight.dtype == torch.float16


def fail_together(rank: int, group: Any, folder: str) -> str:
    """Rank 1 sees no folder: both must say so."""
    try:
        hub.load(folder if rank == 0 else folder + "-gone", group=group)
    except hub.HubError as error:
        return str(error)
    return ""


def too_many(rank: int, group: Any, folder: str) -> str:
    try:
        hub.load(folder, group=group)
    except ValueError as error:
        return str(error)
    return ""


def no_room(rank: int, group: Any, folder: str, to: str) -> str:
    try:
        hub.save(hub.load(folder, group=group), to, group=group)
    except hub.HubError as error:
        return str(error)
    return ""


def test_ranks_fail_together(world, tmp_path, folder):
    assert all(
        "llama-gone is no safetensors file" in message
        for message in world(2).run(fail_together, str(folder))
    )
    hub.save(
        GPT(GPTConfig(vocab_size=9, num_layers=1, num_heads=3, dim=6, activation="gelu_tanh")),
        tmp_path / "three",
    )
    messages = world(4).run(too_many, str(tmp_path / "three"))
    assert all(
        "3 heads in 3 groups can't be split over 4 ranks" in message for message in messages
    ), messages
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "tokenizer.json").write_text("{}")
    messages = world(2).run(no_room, str(folder), str(tmp_path / "there"))
    assert all(
        "there is there already and holds tokenizer.json; a save replaces" in m for m in messages
    ), messages
    (tmp_path / "file").write_text("")
    messages = world(2).run(no_room, str(folder), str(tmp_path / "file" / "m"))
    assert all("can't be written: Not a directory" in message for message in messages), messages


def test_a_model_that_no_architecture_computes(tmp_path):
    mixed = GPT(GPTConfig(vocab_size=9, num_layers=1, num_heads=1, dim=4, positions="rotary"))
    with pytest.raises(
        hub.HubError,
        match=r"gpt2 has no positions = 'rotary'; llama has no norm = 'layernorm', activation",
    ):
        hub.save(mixed, tmp_path / "m")
    both = BERTConfig(
        vocab_size=9, num_layers=1, num_heads=1, dim=4, positions="rotary", rotary_theta=500.0
    )
    with pytest.raises(
        hub.HubError, match=r"roformer has no rotary_theta = 500\.0, pooled_head = True"
    ):
        hub.save(BERT(both), tmp_path / "m")
    with pytest.raises(hub.HubError, match="a Linear is no model that can be written"):
        hub.save(torch.nn.Linear(2, 2), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_roformer_read_as_what_it_is_not(tmp_path):
    config = BERTConfig(
        vocab_size=9,
        sequence_length=8,
        num_layers=1,
        num_heads=1,
        dim=4,
        positions="rotary",
        pooled_head=False,
    )
    hub.save(BERT(config), tmp_path / "m")
    told = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(told | {"embedding_size": None}))
    assert hub.load(tmp_path / "m").config == config.resolved()
    for changes, name in (
        ({"positions": "learned"}, "position_embeddings"),
        ({"pooled_head": True}, "pooler"),
    ):
        with pytest.raises(hub.HubError, match=f"lack . tensors.*{name}"):
            hub.load(tmp_path / "m", **changes)
    (tmp_path / "m" / "config.json").write_text(json.dumps(told | {"embedding_size": 3}))
    with pytest.raises(hub.HubError, match="embedding_size = 3, pyops computes 4 only"):
        hub.load(tmp_path / "m")
