"""Every field of a config.json that changes what transformers computes: pyops computes the same, or
names the field.

Each family's fields are changed one at a time, and by two under `-m full`; weights, biases and
norms are all random. What is loaded is also written, and transformers computes the same from that.
"""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pyops import hub
from pyops.models import BERT, GPT, T5, BERTConfig, GPTConfig, T5Config, ViT, ViTConfig
from tests.grids import full
from tests.hub.bodies import outputs_of
from tests.hub.families import FAMILIES, Family, inputs

pytestmark = pytest.mark.cpu_only

BOUND = 2e-5  # of the largest output, in fp32
ROPE = {"rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 8}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
COMMON: dict[str, list[Any]] = {
    "chunk_size_feed_forward": [7],
    "is_decoder": [True],
    "tie_word_embeddings": [False, True],
    "pad_token_id": [3],
    "head_dim": [8],
    "problem_type": ["regression"],
    "sliding_window": [2],
    "partial_rotary_factor": [0.5],
}
BERTS = {
    "hidden_act": [
        "gelu_new",
        "gelu_pytorch_tanh",
        "gelu_fast",
        "gelu_10",
        "quick_gelu",
        "relu",
        "silu",
    ],
    "layer_norm_eps": [1e-2],
    "position_embedding_type": ["relative_key", "absolute"],
    "type_vocab_size": [4],
    "num_attention_heads": [1, 2],
    "embedding_size": [8, 16],
    "max_position_embeddings": [9],
    "num_hidden_layers": [1],
}
OWN: dict[str, dict[str, list[Any]]] = {
    "gpt2": {
        "activation_function": ["gelu", "gelu_pytorch_tanh", "gelu_fast", "relu"],
        "layer_norm_epsilon": [1e-2],
        "n_inner": [24],
        "scale_attn_weights": [False],
        "scale_attn_by_inverse_layer_idx": [True],
        "embd_pdrop": [0.0],
        "reorder_and_upcast_attn": [True],
        "n_head": [2],
        "add_cross_attention": [True],
        "n_positions": [9],
    },
    "llama": {
        "hidden_act": ["gelu", "swish", "relu"],
        "rms_norm_eps": [1e-2],
        "attention_bias": [True],
        "mlp_bias": [True],
        "num_key_value_heads": [1, 4],
        "head_dim": [4, 8],
        "pretraining_tp": [2],
        "rope_parameters": [
            {"rope_type": "default", "rope_theta": 100.0},
            LLAMA3,
            {**LLAMA3, "factor": 1.0},
            *({**ROPE, "rope_type": kind} for kind in ("linear", "dynamic", "yarn")),
        ],
        "rope_scaling": [{"type": "linear", "factor": 2.0}],
    },
    "bert": BERTS,
    "bert_masked": BERTS,
    "bert_rotary": {**BERTS, "rotary_value": [True]},
    "t5": {
        "feed_forward_proj": ["gelu", "gated-gelu", "gated-silu", "gated-relu", "silu", "gelu_new"],
        "d_kv": [4],
        "dense_act_fn": ["gelu"],
        "is_gated_act": [True],
        "layer_norm_epsilon": [1e-2],
        "num_heads": [2],
        "relative_attention_num_buckets": [4, 6],
        "relative_attention_max_distance": [5],
        "num_decoder_layers": [1],
        "scale_decoder_outputs": [False, True],
    },
    "vit": {
        "hidden_act": ["gelu_new", "relu", "quick_gelu"],
        "layer_norm_eps": [1e-2],
        "qkv_bias": [False],
        "num_labels": [3],
        "image_size": [4, [6, 6], [6, 4]],
        "patch_size": [3, [3, 2]],
        "num_channels": [1],
        "pooler_act": ["relu"],
    },
}


def changes_of(name: str, *, most: int = 9) -> list[dict[str, Any]]:
    return [
        {field: value}
        for field, values in {**COMMON, **OWN[name]}.items()
        for value in values[:most]
    ]


def made(family: Family, changes: dict[str, Any], folder: Path) -> torch.nn.Module | None:
    """A model of transformers, all of it random, in a folder; None for a configuration that
    transformers refuses."""
    given = {
        **family.config.to_dict(),
        **copy.deepcopy(changes),
    }  # transformers writes into what it is given
    for derived in {"feed_forward_proj", "rope_scaling"} & set(changes):
        for key in (
            ("dense_act_fn", "is_gated_act")
            if derived == "feed_forward_proj"
            else ("rope_parameters",)
        ):
            given.pop(key)
    if "num_labels" in changes:
        given.pop("id2label"), given.pop("label2id")
    torch.manual_seed(3)
    try:
        model = family.model(type(family.config)(**given)).eval()
    except ValueError:
        return None
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "embed_positions" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.15)
    model.save_pretrained(folder)
    return model


def outputs_of_theirs(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = model(**given)
    return (
        [found.prediction_logits, found.seq_relationship_logits]
        if "prediction_logits" in found
        else [found.logits]
    )


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert len(found) == len(wanted)
    return max(
        ((f - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True)
    )


def compare(family: Family, changes: dict[str, Any], folder: Path, *, write: bool) -> str:
    """The refusal's message, or "": pyops computes the same, and with `write` transformers does of
    what pyops writes."""
    theirs = made(family, changes, folder / "theirs")
    if theirs is None:
        return "transformers refuses it"
    given = inputs(family)
    if "pixel_values" in given:
        size, channels = theirs.config.image_size, theirs.config.num_channels
        given = {
            "pixel_values": torch.randn(
                3, channels, *(size if isinstance(size, list) else [size, size])
            )
        }
    try:
        model = hub.load(folder / "theirs")
    except hub.HubError as refused:
        text = str(refused)
        assert any(
            field in text and (str(value)[:20] in text or repr(value) in text)
            for field, value in changes.items()
        ) or ("tensors" in text or "in the files, but" in text or "rope_type" in text), (
            f"{changes} is refused without naming it: {text}"
        )
        return text
    wanted = outputs_of_theirs(theirs, given)
    assert wanted[0].std() > 0.05, "outputs this small show nothing"
    assert error(outputs_of(model, given), wanted) <= BOUND, changes
    if not write:
        return ""
    hub.save(model, folder / "ours", like=folder / "theirs")
    again = family.model.from_pretrained(folder / "ours").eval()
    assert error(outputs_of_theirs(again, given), wanted) <= BOUND, f"{changes}, written by pyops"
    return ""


# bert_masked is bert with another head, which no field changes.
FURTHER_BERTS = ("bert_masked", "bert_rotary")


@pytest.mark.parametrize("name", [full(each) if each in FURTHER_BERTS else each for each in OWN])
def test_a_field_is_computed_or_refused(tmp_path, name):
    """The first value of each field."""
    changed = changes_of(name, most=1)
    refused = sum(
        bool(compare(FAMILIES[name], c, tmp_path / str(i), write=False))
        for i, c in enumerate(changed)
    )
    assert 0 < refused < len(changed), "both happen in every family"


@pytest.mark.full
@pytest.mark.parametrize("name", list(OWN))
def test_every_value_is_computed_or_refused(tmp_path, name):
    for i, changes in enumerate(changes_of(name)):
        compare(FAMILIES[name], changes, tmp_path / str(i), write=True)


@pytest.mark.full
@pytest.mark.parametrize("name", list(OWN))
def test_two_fields_are_computed_or_refused(tmp_path, name):
    for i, (one, other) in enumerate(itertools.combinations(changes_of(name), 2)):
        if one.keys() != other.keys():
            compare(FAMILIES[name], {**one, **other}, tmp_path / str(i), write=False)


def test_stretched_angles_of_a_part_of_a_head_are_refused(tmp_path):
    """Wherever the part stands; transformers itself can't compute them."""
    for i, changes in enumerate(
        (
            {"rope_parameters": LLAMA3, "partial_rotary_factor": 0.5},
            {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}},
            {"rope_parameters": {**LLAMA3, "factor": 1.0, "partial_rotary_factor": 0.5}},
        )
    ):
        made(FAMILIES["llama"], changes, tmp_path / str(i))
        with pytest.raises(
            hub.HubError, match=r"partial_rotary_factor = 0\.5; pyops turns whole heads"
        ):
            hub.load(tmp_path / str(i))
    assert (
        compare(
            FAMILIES["llama"],
            {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 1.0}},
            tmp_path,
            write=True,
        )
        == ""
    )


@pytest.mark.parametrize(
    "scaling", [LLAMA3, {**LLAMA3, "rope_theta": 30.0, "factor": 3.0}, {}, None]
)
def test_a_file_with_both_ways_to_write_angles(tmp_path, scaling):
    """Of transformers 4 and of 5; transformers 5 takes the older one, where there is one."""
    family = FAMILIES["llama"]
    made(family, {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**told, "rope_scaling": scaling, "rope_theta": 20.0})
    )
    given = inputs(family)
    wanted = outputs_of_theirs(family.model.from_pretrained(tmp_path).eval(), given)
    assert error(outputs_of(hub.load(tmp_path), given), wanted) <= BOUND


def test_angles_that_are_not_those_of_the_positions(tmp_path):
    """transformers takes RoFormer's from the file, whatever they are."""
    made(FAMILIES["bert_rotary"], {}, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    (name,) = (name for name in tensors if "embed_positions" in name)
    save_file(
        {**tensors, name: tensors[name].half()},
        tmp_path / "m" / "model.safetensors",
        {"format": "pt"},
    )
    hub.load(tmp_path / "m", dtype=torch.float32)  # rounded to the dtype of the file
    for changed in (
        tensors[name] + 0.01,
        tensors[name][:-1].clone(),
        tensors[name].flip(1).contiguous(),
    ):
        save_file(
            {**tensors, name: changed}, tmp_path / "m" / "model.safetensors", {"format": "pt"}
        )
        with pytest.raises(
            hub.HubError, match=r"embed_positions\.weight differs from what pyops computes"
        ):
            hub.load(tmp_path / "m")


def test_a_head_that_is_not_tied_has_its_own_bias(tmp_path):
    """Of BERT and RoFormer; files of transformers 4 have one tensor for both, under either name."""
    for name in ("bert", "bert_masked", "bert_rotary"):
        folder = tmp_path / name
        theirs: Any = made(FAMILIES[name], {"tie_word_embeddings": False}, folder)
        head = theirs.cls.predictions
        assert not torch.equal(head.decoder.bias, head.bias)
        assert torch.equal(hub.load(folder).head.output.bias, head.decoder.bias)
        tensors = load_file(folder / "model.safetensors")
        kept = tensors.pop("cls.predictions.decoder.bias")
        save_file(
            {**tensors, "cls.predictions.bias": kept},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        assert torch.equal(hub.load(folder).head.output.bias, head.decoder.bias)


@pytest.mark.parametrize("together", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_pyops_makes_transformers_computes(tmp_path, together):
    """Or it is refused when it is written: every option of our configurations, alone and by two."""
    small: dict[str, Any] = {"vocab_size": 53, "num_layers": 2, "num_heads": 4, "dim": 16}
    own: list[tuple[Any, Any, dict[str, Any], dict[str, list[Any]]]] = [
        (
            GPT,
            GPTConfig,
            {"activation": "gelu_tanh", "sequence_length": 11},
            {
                "norm": ["rmsnorm"],
                "activation": ["gelu", "relu", "swiglu"],
                "positions": ["rotary"],
                "tied_head": [False],
                "bias": [False],
                "norm_eps": [1e-2],
                "num_kv_heads": [2],
                "head_dim": [6],
                "hidden": [24],
            },
        ),
        (
            GPT,
            GPTConfig,
            {
                "activation": "swiglu",
                "norm": "rmsnorm",
                "positions": "rotary",
                "bias": False,
                "sequence_length": 11,
            },
            {
                "rotary_theta": [77.0],
                "rotary_stretch": [4.0],
                "rotary_low": [2.0],
                "num_kv_heads": [2],
                "tied_head": [False],
                "bias": [True],
                "head_dim": [6],
                "norm_eps": [1e-2],
            },
        ),
        (
            BERT,
            BERTConfig,
            {"sequence_length": 11, "num_types": 3},
            {
                "activation": ["gelu_tanh", "relu"],
                "tied_head": [False],
                "pooled_head": [False],
                "positions": ["rotary"],
                "rotary_theta": [77.0],
                "norm_eps": [1e-2],
                "hidden": [24],
            },
        ),
        (
            T5,
            T5Config,
            {"num_buckets": 8, "max_distance": 10},
            {
                "activation": ["gelu", "gated_gelu", "swiglu"],
                "tied_head": [False],
                "scaled_head": [False],
                "start_token": [2],
                "num_decoder_layers": [1],
                "head_dim": [6],
                "norm_eps": [1e-2],
                "num_buckets": [4],
            },
        ),
    ]
    vit = {
        "num_labels": 5,
        "image_size": 6,
        "patch_size": 2,
        "num_channels": 2,
        "num_layers": 2,
        "num_heads": 4,
        "dim": 16,
    }
    own.append(
        (
            ViT,
            ViTConfig,
            vit,
            {"activation": ["gelu_tanh", "relu"], "norm_eps": [1e-2], "hidden": [24]},
        )
    )
    written = 0
    for n, (kind, config, base, choices) in enumerate(own):
        singles = [{}, *({field: value} for field, values in choices.items() for value in values)]
        for i, some in enumerate(itertools.combinations(singles, together)):
            options = {key: value for each in some for key, value in each.items()}
            sizes = {} if kind is ViT else small
            written += written_is_computed(
                kind, config(**{**sizes, **base, **options}), tmp_path / f"{n}-{i}"
            )
    assert written > 20 * together


def written_is_computed(kind: Any, config: Any, folder: Path) -> bool:
    model = kind(config, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    try:
        hub.save(model, folder)
    except hub.HubError:
        return False
    told = json.loads((folder / "config.json").read_text())
    theirs = getattr(transformers, told["architectures"][0]).from_pretrained(folder).eval()
    name = {"vit": "vit", "t5": "t5", "bert": "bert", "roformer": "bert"}.get(
        told["model_type"], "gpt2"
    )
    given = inputs(FAMILIES[name])
    assert error(outputs_of(model, given), outputs_of_theirs(theirs, given)) <= BOUND, config
    return True
