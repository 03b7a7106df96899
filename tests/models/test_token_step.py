"""A step of generation as a list of kernels, against the modules whose calls it replaces: the same
numbers, and nothing that a module does beside its own forward is passed over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.adapters import LoRA
from pyops.mesh import ALONE
from pyops.models import GPT, GPTConfig, generate
from pyops.models.generation import decoders, token_step
from pyops.models.generation.decoders import GPTDecoder
from pyops.quantized import Int4, Int8, Scheme, convert
from pyops.tensor_parallel import RMSNorm, RowSpan, initialize_model_

pytestmark = pytest.mark.cpu_only

WORDS = 40
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "sequence_length": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dim": 32,
    "hidden": 48,
    "dropout": 0.1,
}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
    "tied_head": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "grouped queries": {**LLAMA, "num_kv_heads": 2},
}
SCHEMES: dict[str, Scheme | None] = {
    "fp32": None,
    "int8": Scheme(weights=Int8()),
    "int4": Scheme(weights=Int4(group=16)),
    "int8 activations": Scheme(weights=Int8(), activations=Int8(per="token")),
}
TEXTS = [[3, 1, 4, 1, 5, 9, 2], [2, 6, 5, 3, 5, 8, 9], [9, 7, 9, 3, 2, 3, 8]]
BEGUN = [4, 1, 2]  # of each text, before one token of each follows at a time


def made(kind: str = "llama", scheme: Scheme | None = None) -> GPT:
    """A model in evaluation mode whose every parameter matters."""
    model = GPT(GPTConfig(**SIZES, **KINDS[kind]), group=ALONE, seed=None)
    with torch.no_grad():
        initialize_model_(model, seed=4, std=lambda name: 0.5)
    if scheme is not None:
        convert(model, scheme)
    return model.eval()


def logits_of_steps(model: GPT, begun: list[int], *, stepped: bool) -> tuple[Tensor, Tensor]:
    """[3, rows, V], the logits of three tokens of each text after the first `begun`, and keys and
    values behind them; by the modules where not `stepped`."""
    decoder = GPTDecoder(model, [len(begun)])
    if not stepped:
        decoder.leave_to_modules()
    found = []
    with torch.inference_mode():
        for row, count in enumerate(begun):
            decoder.hidden(0, RowSpan(row, [0], count), torch.tensor([TEXTS[row][:count]]), None)
        for step in range(3):
            lengths = [count + step for count in begun]
            tokens = torch.tensor([[TEXTS[row][n]] for row, n in enumerate(lengths)])
            x = decoder.hidden(0, RowSpan(0, lengths, 1), tokens, None)
            found.append(decoder.logits(x, (len(begun), 1)))
        assert (decoder.step is not None) == stepped
    kept = torch.stack([torch.stack(list(cache._kept or ())) for cache in decoder.caches[0]])
    return torch.stack(found), kept


@pytest.mark.parametrize("begun", [[4], [3, 3], BEGUN], ids=["one", "even", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_step_has_the_numbers_of_the_modules(kind, begun, dtype):
    """Logits, and keys and values, of one row, rows of one length, and rows of several: up to the
    order of attention's sums in fp32, with the same bits else."""
    model = made(kind).to(dtype)
    logits, kept = logits_of_steps(model, begun, stepped=True)
    expected, expected_kept = logits_of_steps(model, begun, stepped=False)
    if dtype == torch.float32:
        assert_equal_but_for_rounding(logits, expected)
        assert_equal_but_for_rounding(kept, expected_kept)
    else:
        assert torch.equal(logits, expected)
        assert torch.equal(kept, expected_kept)
    assert (logits[0] - logits[1]).abs().max() > 0.1  # tokens matter


def assert_equal_but_for_rounding(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "fp32"])
def test_a_step_of_codes_has_the_numbers_of_the_modules(kind, scheme):
    model = made(kind, SCHEMES[scheme])
    logits, _ = logits_of_steps(model, BEGUN, stepped=True)
    expected, _ = logits_of_steps(model, BEGUN, stepped=False)
    assert_equal_but_for_rounding(logits, expected)


@pytest.mark.parametrize("begun", [[4], BEGUN], ids=["one", "ragged"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_at_once_have_the_bits_of_the_list(kind, scheme, begun, monkeypatch):
    """Logits, keys and values."""
    model = made(kind, SCHEMES[scheme])
    found = logits_of_steps(model, begun, stepped=True)
    monkeypatch.setattr(token_step, "_stack", lambda blocks: None)
    expected = logits_of_steps(model, begun, stepped=True)
    assert all(map(torch.equal, found, expected))


def test_norms_whose_weight_is_an_offset_from_one():
    """In all blocks, and so in one call."""
    model = made()
    before, _ = logits_of_steps(model, BEGUN, stepped=True)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.offset = 1.0
    with torch.no_grad():
        step = GPTDecoder(model, [1]).step
    assert step is not None
    assert step._stack is not None
    logits, _ = logits_of_steps(model, BEGUN, stepped=True)
    expected, _ = logits_of_steps(model, BEGUN, stepped=False)
    assert_equal_but_for_rounding(logits, expected)
    assert (logits - before).abs().max() > 0.1


def norms_of_another_eps(model: GPT) -> None:
    model.blocks[1].norm2.eps = 50.0  # type: ignore[union-attr]


def first_norms_of_another_eps(model: GPT) -> None:
    model.blocks[1].norm1.eps = 50.0  # type: ignore[union-attr]


def scores_of_another_scale(model: GPT) -> None:
    model.blocks[1].attention.scale = 2.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        norms_of_another_eps,
        first_norms_of_another_eps,
        scores_of_another_scale,
    ],
)
def test_blocks_that_are_not_alike_are_computed_one_by_one(change: Callable[[GPT], None]):
    model = made()
    before, _ = logits_of_steps(model, BEGUN, stepped=True)
    change(model)
    with torch.no_grad():
        step = GPTDecoder(model, [1]).step
    assert step is not None
    assert step._stack is None
    logits, _ = logits_of_steps(model, BEGUN, stepped=True)
    expected, _ = logits_of_steps(model, BEGUN, stepped=False)
    assert_equal_but_for_rounding(logits, expected)
    assert (logits - before).abs().max() > 0.1  # what was changed matters


def test_more_rows_than_the_kernels_take_are_left_to_the_list(monkeypatch):
    """Of codes, more than 16."""
    model, called = made(scheme=SCHEMES["int8"]), []
    real = token_step.token_blocks_
    monkeypatch.setattr(
        token_step, "token_blocks_", lambda *a, **k: called.append(len(a[0])) or real(*a, **k)
    )
    for rows in (16, 17):
        prompts = [[1 + row, 2] for row in range(rows)]
        list(generate(model, prompts, max_new=2, temperature=0, rows=rows))
    assert called == [16]


def hooked(model: GPT) -> None:
    model.blocks[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]


def adapted(model: GPT) -> None:
    LoRA(model, rank=2, alpha=4)
    model.eval()


def partly_in_training(model: GPT) -> None:
    model.blocks[0].dropout1.train()


def of_another_class(model: GPT) -> None:
    class Other(type(model.blocks[0].mlp)):  # type: ignore[misc]
        """Whose forward may be another."""

    model.blocks[0].mlp.__class__ = Other


def with_another_forward(model: GPT) -> None:
    model.blocks[0].norm1.forward = lambda x: x  # type: ignore[method-assign]


def cut(model: GPT) -> None:
    del model.blocks._modules["1"]


def of_two_dtypes(model: GPT) -> None:
    model.blocks[0].norm1.double()


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        adapted,
        partly_in_training,
        of_another_class,
        with_another_forward,
        cut,
        of_two_dtypes,
    ],
)
def test_what_a_step_would_pass_over_is_left_to_the_modules(change: Callable[[GPT], None]):
    model = made()
    with torch.no_grad():
        assert GPTDecoder(model, [1]).step is not None
        change(model)
        assert GPTDecoder(model, [1]).step is None


def test_surroundings_that_a_step_does_not_know_leave_it_to_the_modules():
    """Gradients, autocast, hooks of all modules, and keys and values in another dtype."""
    model = made()
    assert GPTDecoder(model, [1]).step is None
    with torch.no_grad():
        assert GPTDecoder(model, [1], torch.float32).step is not None
        assert GPTDecoder(model, [1], torch.bfloat16).step is None
        with torch.autocast("cpu", torch.bfloat16):
            assert GPTDecoder(model, [1]).step is None
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            assert GPTDecoder(model, [1]).step is None
        finally:
            handle.remove()


def test_weights_that_change_while_a_row_is_handed_out_count_from_then_on(monkeypatch):
    """The parameters themselves are others, so that a step of before would not see it. The second
    prompt was read before."""
    other = made()
    with torch.no_grad():
        initialize_model_(other, seed=5, std=lambda name: 0.5)

    def second_row(*, changed: bool) -> list[int]:
        model = made()
        rows = generate(model, [[3, 1, 4], [2, 7]], max_new=8, temperature=0, rows=1)
        next(rows)
        for module, source in zip(model.modules(), other.modules(), strict=True):
            if changed:
                module._parameters.update(source._parameters)
        return next(rows).tokens

    found, unchanged = second_row(changed=True), second_row(changed=False)
    monkeypatch.setattr(decoders, "token_step", lambda *_: None)
    assert found == second_row(changed=True)
    assert unchanged == second_row(changed=False)
    assert found != unchanged


def test_a_step_is_few_calls():
    """Calls of Python and of C for each token and layer, which do not depend on the machine's load;
    the modules' own calls are some 400."""

    def calls(layers: int, tokens: int) -> int:
        config = GPTConfig(**{**SIZES, **LLAMA, "num_layers": layers})
        model = GPT(config, group=ALONE, seed=1)
        list(generate(model, [[1, 2]], max_new=2, temperature=0))
        count = 0

        def counting(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(counting)
        try:
            list(generate(model, [[1, 2]], max_new=tokens, temperature=0))
        finally:
            sys.setprofile(before)
        return count

    of_a_layer = [calls(3, tokens) - calls(1, tokens) for tokens in (4, 12)]
    each = (of_a_layer[1] - of_a_layer[0]) / (2 * 8)
    assert 1 < each <= 20, f"{each} calls for each token and layer"
