"""pyops.hf.apply_kernels(fused_loss=True): the loss of a causal language model without logits."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.hf import apply_kernels
from tests.hf.tiny_transformers import (
    ALL,
    VOCABULARY,
    assert_no_worse,
    batch,
    exact,
    made,
)

pytestmark = pytest.mark.cpu_only


def exact_loss(model: Any, labels: Tensor, num_items: int | None) -> Tensor:
    """Of a float64 model's logits, in float64."""
    logits = model(batch()["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
    return total / (int((labels[:, 1:] != -100).sum()) if num_items is None else num_items)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("num_items", [None, 29, torch.tensor(31)])
def test_the_fused_loss_is_the_loss(name, num_items):
    labels = batch()["labels"]
    model = made(name).train()
    reference = exact(model)
    exact_loss(reference, labels, None if num_items is None else int(num_items)).backward()
    loss = exact_loss(reference, labels, None if num_items is None else int(num_items))
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    wide, plain, fused = copy.deepcopy(model).double(), model, copy.deepcopy(model)
    given = {**batch(), "num_items_in_batch": num_items}
    results = []
    for each in (wide, plain, fused):
        if each is not plain:
            apply_kernels(each, kinds=ALL, fused_loss=True)
        outputs = each(**given)
        outputs.loss.backward()
        results.append((outputs, {n: p.grad for n, p in each.named_parameters()}))
    (of_wide, wide_found), (of_plain, plain_found), (of_fused, fused_found) = results
    assert type(of_fused) is type(of_plain)
    assert of_fused.logits is None
    assert of_plain.logits is not None
    torch.testing.assert_close(of_wide.loss, loss.detach(), rtol=1e-7, atol=0)
    for key, x in wanted.items():
        torch.testing.assert_close(wide_found[key], x, rtol=1e-5, atol=1e-6 * float(x.abs().max()))
    assert_no_worse(
        {"loss": of_fused.loss.detach()[None], **fused_found},
        {"loss": of_plain.loss.detach()[None], **plain_found},
        {"loss": loss.detach()[None], **wanted},
    )


def test_logits_are_there_when_they_are_asked_for():
    model, plain = made("LlamaForCausalLM"), made("LlamaForCausalLM")
    apply_kernels(model, kinds=(), fused_loss=True)
    given = batch()
    wanted = plain(**given)
    for found in (model(**given), model(given["input_ids"], labels=given["labels"])):
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(found.loss, wanted.loss)
    without = model(**given, skip_logits=True)
    assert without.logits is None
    torch.testing.assert_close(without.loss, wanted.loss)
    model.train()
    assert torch.equal(model(given["input_ids"]).logits, wanted.logits)
    assert torch.equal(model(**given, skip_logits=False).logits, wanted.logits)
    kept = model(given["input_ids"], logits_to_keep=1).logits
    assert torch.equal(kept, plain(given["input_ids"], logits_to_keep=1).logits)
    as_tuple = model(**given, return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], wanted.loss)
    hidden = model(**given, output_hidden_states=True)
    assert hidden.logits is None
    assert len(hidden.hidden_states) == 3
    shifted = nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(**given, shift_labels=shifted).loss, wanted.loss)
    ours, theirs = (inspect.signature(each.forward).parameters for each in (model, plain))
    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
    nothing = model(given["input_ids"], labels=torch.full_like(given["labels"], -100)).loss
    assert nothing.isnan()


def test_a_head_with_an_adapter_and_a_loss_of_the_caller_keep_their_logits():
    import peft

    model = made("LlamaForCausalLM").train()
    apply_kernels(model, kinds=(), fused_loss=True)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert model(**batch()).logits is not None
    del model._loss_function
    assert model(**batch()).logits is None
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    assert adapted.train()(**batch()).logits is not None


def test_a_sequence_is_generated_as_before():
    model = made("LlamaForCausalLM")
    ids = batch()["input_ids"][:1]
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": VOCABULARY + 1}
    wanted = model.generate(ids, **options)
    apply_kernels(model, kinds=ALL, fused_loss=True)
    assert torch.equal(model.generate(ids, **options), wanted)
