"""Every form gives back the bits of weights and masks, at any number of tensor-parallel ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.sparse import _semi_structured_conversions as cutlass

from pyops import pruning
from pyops.models import GPT, GPTConfig
from pyops.pruning import NM, Masks, form_bytes, load, masks_of, nm_masks, permute, save
from pyops.pruning.saving import FORMS, to_semi_structured
from pyops.tensor_parallel import whole_state_dict

pytestmark = pytest.mark.cpu_only

CONFIG = GPTConfig(
    vocab_size=20,
    sequence_length=12,
    num_layers=1,
    num_heads=4,
    dim=16,
    activation="swiglu",
    hidden=32,
    num_kv_heads=2,
)
FILE = "pruned.safetensors"


def pruned() -> tuple[GPT, Masks]:
    """With a weight that is 0 and alive."""
    model = GPT(CONFIG)
    masks = nm_masks(model)
    with torch.no_grad():
        weight = masks.parameter("blocks.0.mlp.down.weight")
        row = weight[3]
        row[int(row.nonzero()[0])] = 0.0
    return model, masks


def bits(masks: Any) -> dict[str, list[int]]:
    return {name: mask.bits.tolist() for name, mask in masks.items()}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_back_the_bits(form: str, tmp_path):
    model, masks = pruned()
    save(model, tmp_path / "a", form=form)
    other = GPT(CONFIG, seed=5)
    found = load(other, tmp_path / "a")
    assert (found.form, found.orders) == (form, {})
    assert bits(found.masks) == bits(masks) == bits(masks_of(other))
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert int((masks.parameter("blocks.0.mlp.down.weight") != 0).sum()) < (
        masks["blocks.0.mlp.down.weight"].kept
    )
    save(other, tmp_path / "a", form="packed")  # over an earlier one
    assert load(GPT(CONFIG), tmp_path / "a").form == "packed"


def test_bytes_of_each_form():
    w = torch.randn(6, 40)
    alive = NM(2, 4).alive(w)
    n, keep = 240, 120
    assert form_bytes(w, alive, "dense") == 4 * n + n / 8
    assert form_bytes(w, alive, "packed") == n / 8 + 4 * keep
    assert form_bytes(w, alive, "2:4") == 2 * n + n / 8
    assert form_bytes(w, alive, "csr") == 8 * keep + 4 * 7
    few = torch.rand(6, 40) < 0.05
    assert form_bytes(w, few, "packed") == n / 8 + 4 * int(few.sum())
    for form in ("dense", "packed", "csr"):
        parts = FORMS[form][0](w, few)
        again, mask = FORMS[form][1](parts, (6, 40))
        assert torch.equal(mask, few)
        assert torch.equal(again[few], w[few])
    kernel = torch.randn(3, 12, 2, 2)  # indices of 12 inputs: a byte and a half
    mask = NM(2, 4).alive(kernel)
    for form in FORMS:
        again, found = FORMS[form][1](FORMS[form][0](kernel * mask, mask), tuple(kernel.shape))
        assert torch.equal(found, mask)
        assert torch.equal(again, kernel * mask)


def test_indices_are_those_of_semi_structured_tensors():
    """torch's own metadata, before CUTLASS' order of its words, has four groups to an int16."""
    w = torch.randn(32, 64).half()
    alive = NM(2, 4).alive(w)
    parts = FORMS["2:4"][0](w * alive, alive)
    values, metadata = cutlass.sparse_semi_structured_from_dense_cutlass(w * alive)
    assert torch.equal(parts[":values"], values)
    own = parts[":indices"].contiguous().view(torch.int16)
    offsets = cutlass._calculate_meta_reordering_scatter_offsets(32, 4, torch.int16, w.device)
    assert torch.equal(metadata.view(-1)[offsets].view(32, 4), own)


def test_a_module_of_anybody_with_running_statistics(tmp_path):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3))
    model(torch.randn(5, 4, 3, 3))
    masks = nm_masks(model)
    assert list(masks) == ["0.weight"]
    save(model, tmp_path / "a", form="2:4")
    other = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3))
    load(other, tmp_path / "a")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert float(other[1].running_mean.abs().max()) > 0


def resaved(rank: int, group: Any, folder: str) -> dict[str, Any]:
    """Loads a file, gives back what two ranks have together, and saves it in other forms."""
    model = GPT(CONFIG, group=group, seed=9)
    found = load(model, f"{folder}/whole")
    assert set(found.masks) == set(masks_of(model))
    for name, mask in found.masks.items():
        assert mask.shape == tuple(model.get_parameter(name).shape)
        assert bool((model.get_parameter(name)[~mask.alive()] == 0).all())
    for form in FORMS:
        save(model, f"{folder}/{form}", form=form)
    return whole_state_dict(model, group=group)


def test_files_of_one_rank_and_of_two(world, tmp_path):
    model, masks = pruned()
    save(model, tmp_path / "whole", form="2:4")
    for state in world(2).run(resaved, str(tmp_path)):
        for name, p in model.state_dict().items():
            assert torch.equal(state[name].view_as(p), p), name
    for form in FORMS:
        other = GPT(CONFIG, seed=3)
        assert bits(load(other, tmp_path / form).masks) == bits(masks)
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
        )


def test_orders_of_permuted_channels_are_stored(tmp_path):
    model = GPT(CONFIG)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    permuted = permute(model, escapes=0)
    masks = nm_masks(model)
    save(model, tmp_path / "a", form="2:4", orders=permuted.orders)
    other = GPT(CONFIG, seed=4)
    found = load(other, tmp_path / "a")
    assert set(found.orders) == set(permuted.orders)
    pruning.rearrange(other, {n: pruning.inverse(o) for n, o in found.orders.items()})
    moved = 0
    for name, p in other.named_parameters():
        alive = found.masks[name].alive() if name in found.masks else torch.ones_like(p).bool()
        assert torch.equal(p, torch.where(alive, start[name], 0.0)), name
        moved += name in masks and bits(found.masks)[name] != bits(masks)[name]
    assert moved >= 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("form", r"form is 'zip'; choose one of dense, packed, 2:4, csr"),
        ("masks", r"GPT has no masks; make them by magnitude, nm_masks or finish\(\)"),
        ("pattern", r"q.weight \(16, 16\) is not 2 of each 4 inputs; save it as form='packed'"),
        ("folder", r"holds notes.txt; a save replaces what it wrote and nothing else"),
        ("file", r"pruning.save: .* can't be written: Not a directory; make room, or name"),
    ],
)
def test_what_save_refuses(change: str, message: str, tmp_path):
    model = GPT(CONFIG)
    if change == "pattern":
        nm_masks(model, NM(1, 4))
    elif change != "masks":
        nm_masks(model)
    if change == "folder":
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "notes.txt").write_text("mine")
    place = tmp_path / "a"
    if change == "file":
        place = tmp_path / "notes" / "a"
        place.parent.write_text("mine")
    with pytest.raises(ValueError, match=message):
        save(model, place, form="zip" if change == "form" else "2:4")
    assert not [path for path in tmp_path.rglob("*.tmp")]
    assert not (tmp_path / "a" / FILE).exists()


def damaged(folder, change) -> None:
    with safe_open(folder / FILE, "pt") as opened:
        tensors: dict[str, Tensor] = {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
        note = json.loads(opened.metadata()["pyops_pruning"])
    change(tensors, note)
    save_file(tensors, folder / FILE, metadata={"pyops_pruning": json.dumps(note)})


DOWN = "blocks.0.mlp.down.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, n: n.update(version=7), r"damaged, or of another pyops \(version 7"),
        (lambda t, n: n.pop("shapes"), r"damaged, or of another pyops \('shapes'\)"),
        (lambda t, n: t.pop("head.norm.weight"), r"the file has no head.norm.weight; load the"),
        (lambda t, n: t.update(extra=torch.ones(2)), r"the model has no extra"),
        (lambda t, n: t.pop(f"{DOWN}:bits"), r"down.weight is no packed of \(16, 32\)"),
        (
            lambda t, n: t.update({f"{DOWN}:values": t[f"{DOWN}:values"][:1].clone()}),
            r"1 values for 256 that are alive",
        ),
        (
            lambda t, n: t.update({"head.norm.weight": torch.ones(8)}),
            r"head.norm.weight is torch.float32 \(8,\), in the model torch.float32 \(16,\)",
        ),
    ],
)
def test_what_load_refuses(change, message: str, tmp_path):
    save(pruned()[0], tmp_path / "a")
    damaged(tmp_path / "a", change)
    model = GPT(CONFIG, seed=6)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load(model, tmp_path / "a")
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert not masks_of(model)


def test_files_that_are_not_there_and_models_that_are_pruned(tmp_path):
    model, _ = pruned()
    with pytest.raises(ValueError, match=r"b.pruned.safetensors does not exist; name a folder"):
        load(model, tmp_path / "b")
    save(model, tmp_path / "a")
    with pytest.raises(ValueError, match=r"has a mask already; call release\(\)"):
        load(model, tmp_path / "a")
    (tmp_path / "a" / FILE).write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match=r"damaged, or of another pyops"):
        load(GPT(CONFIG), tmp_path / "a")


def test_semi_structured_weights_are_of_cuda():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).half()
    with pytest.raises(ValueError, match=r"no torch.nn.Linear with a mask; prune it by nm_masks"):
        to_semi_structured(model)
    nm_masks(model)
    before = model[0].weight
    with pytest.raises(ValueError, match=r"0.weight is on cpu.*save it with form='2:4'"):
        to_semi_structured(model)
    assert model[0].weight is before
