"""Texts generated with keys and values kept, beside the same model of transformers, and a step that
trains adapters.

    generate    8 layers, width 512: one row, and 16 rows of different lengths, against generate of
                transformers, `sample`, and the whole text computed for every token
    adapters    LoRA of rank 8 on all linear layers: forward and backward, against forward and the
                gradients of the layers' inputs alone, and peft

Greedy, in fp32, with weights that transformers drew; what is generated is compared first.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases

__all__ = ["cases", "run"]

WORDS, WIDTH, LAYERS = 4096, 512, 8
PROMPT, NEW = 32, 256
RAGGED = [16 + 3 * i for i in range(16)]  # lengths of prompts


def made(device: torch.device) -> tuple[Any, Any]:
    """A Llama of transformers, and the same of pyops."""
    import transformers

    from pyops import hub

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = transformers.LlamaForCausalLM(config).eval().to(device)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = hub.load(folder).eval().to(device)
    return ours, theirs


def prompts(lengths: list[int], device: torch.device) -> list[Tensor]:
    """Tokens, none of them that of padding."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, WORDS, (n,), generator=generator).to(device) for n in lengths]


def ours_of(model: nn.Module, given: list[Tensor], new: int) -> list[list[int]]:
    """By pyops."""
    from pyops.models import generate

    rows = generate(model, given, max_new=new, temperature=0, rows=len(given))
    return [row.tokens for row in rows]


@torch.no_grad()
def theirs_of(model: Any, given: list[Tensor], new: int) -> list[list[int]]:
    """By transformers: rows padded on the left."""
    most = max(map(len, given))
    tokens = torch.stack([nn.functional.pad(p, (most - len(p), 0)) for p in given])
    mask = torch.stack([nn.functional.pad(torch.ones_like(p), (most - len(p), 0)) for p in given])
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=new, do_sample=False)
    result: list[list[int]] = found[:, most:].tolist()
    return result


@torch.no_grad()
def whole_text_seconds(model: nn.Module, prompt: Tensor, new: int) -> float:
    """What `new` tokens take where each is computed from the whole text before it: every sixteenth
    of them, times 16."""
    total = 0.0
    for length in range(len(prompt) + 8, len(prompt) + new, 16):
        tokens = prompt.repeat(1, -(-length // len(prompt)))[:, :length]
        start = time.perf_counter()
        model(tokens)[:, -1].argmax(-1).tolist()
        total += 16 * (time.perf_counter() - start)
    return total


def sampled(model: nn.Module, prompt: Tensor, new: int) -> list[list[int]]:
    """By `sample`."""
    from pyops.models import sample

    found = sample(model, prompt, num_tokens=new, context=512, temperature=0)
    return [found[len(prompt) :].tolist()]


def check_texts(
    ours: Callable[[], list[list[int]]], *others: Callable[[], list[list[int]]]
) -> None:
    """Every way gives the same tokens; a difference of rounding would show in few."""
    own = ours()
    for other in others:
        found = other()
        pairs = zip(own, found, strict=True)
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
        if sum(same) < 0.9 * sum(map(len, own)):
            raise AssertionError(f"of {list(map(len, own))} tokens {same} are the same")


def one_row(device: torch.device) -> Case:
    """One row, against everything else."""
    model, theirs = made(device)
    (prompt,) = prompts([PROMPT], device)
    calls: dict[str, Callable[[], list[list[int]]]] = {
        "pyops generate": partial(ours_of, model, [prompt], NEW),
        "transformers generate": partial(theirs_of, theirs, [prompt], NEW),
        "pyops sample": partial(sampled, model, prompt, NEW),
    }

    def observe(row: Row) -> dict[str, Any]:
        """Beside the whole text for each token, which takes too long to be a rival."""
        seconds = whole_text_seconds(model, prompt, NEW)
        found = per_second(dict.fromkeys(calls, NEW), row)
        ratio = seconds / (row["us"]["pyops generate"][1] / 1e6)
        return {**found, "whole_text_s": round(seconds, 2), "times_whole_text": round(ratio, 1)}

    return Case(
        "generation",
        f"{LAYERS} layers, width {WIDTH}, 1 row, {PROMPT} + {NEW} tokens",
        calls,
        check=lambda: check_texts(*calls.values()),
        device=device,
        targets={"transformers generate": 1.2},
        least={"times_whole_text": 20.0},
        observe=observe,
    )


def ragged_rows(device: torch.device) -> Case:
    """16 rows of different lengths, against one."""
    model, theirs = made(device)
    given, new = prompts(RAGGED, device), 64
    calls: dict[str, Callable[[], list[list[int]]]] = {
        "pyops, 16 rows": partial(ours_of, model, given, new),
        "transformers, 16 rows": partial(theirs_of, theirs, given, new),
        "pyops, 1 row": partial(ours_of, model, given[8:9], new),
    }
    tokens = {"pyops, 16 rows": 16 * new, "transformers, 16 rows": 16 * new, "pyops, 1 row": new}

    def observe(row: Row) -> dict[str, Any]:
        found = per_second(tokens, row)
        rates = found["tokens_per_s"]
        ratio = rates["pyops, 16 rows"] / rates["pyops, 1 row"]
        return {**found, "tokens_per_s_of_one_row": round(ratio, 2)}

    return Case(
        "generation",
        f"{LAYERS} layers, width {WIDTH}, 16 rows of {RAGGED[0]} to {RAGGED[-1]} + {new} tokens",
        calls,
        check=lambda: check_texts(*(calls[name] for name in list(calls)[:2])),
        device=device,
        least={"tokens_per_s_of_one_row": 6.0},
        observe=observe,
    )


def per_second(tokens: dict[str, int], row: Row) -> dict[str, Any]:
    """Tokens a second of each implementation that made so many."""
    rates = {name: 1e6 * tokens[name] / us[1] for name, us in row["us"].items() if name in tokens}
    return {"tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()}}


def adapters(device: torch.device) -> Case:
    """Forward and backward of 4 rows of 128 tokens."""
    import peft

    from pyops.adapters import LoRA

    adapted, theirs = made(device)
    base, _ = made(device)
    base.requires_grad_(False)
    LoRA(adapted, rank=8, alpha=16)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(r=8, target_modules=linear))
    tokens = torch.stack(prompts([128] * 4, device))

    def of_inputs() -> float:
        x = base.embedding(tokens).requires_grad_()
        y = x
        for block in base.blocks:
            y = block(y, tuple(tokens.shape))
        loss = base.head(y[:, :-1], (4, 127), targets_BT=tokens[:, 1:])
        loss.backward()
        return float(loss.detach())

    def step() -> float:
        loss = adapted.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        adapted.zero_grad(set_to_none=True)
        return float(loss.detach())

    def rival() -> float:
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        wrapped.zero_grad(set_to_none=True)
        return float(loss.detach())

    def check() -> float:
        losses = [step(), of_inputs(), rival()]
        worst = max(abs(loss - losses[0]) for loss in losses)
        if worst > 1e-3:
            raise AssertionError(f"the losses are {losses}")
        return worst

    return Case(
        "generation",
        f"LoRA of rank 8, {LAYERS} layers, width {WIDTH}, 4 x 128 tokens, forward and backward",
        {
            "pyops LoRA": step,
            "forward and gradients of inputs": of_inputs,
            "peft": rival,
        },
        check=check,
        device=device,
        targets={"forward and gradients of inputs": 1 / 1.1},
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    yield "1 row", partial(one_row, device)
    yield "16 rows", partial(ragged_rows, device)
    yield "LoRA", partial(adapters, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    chosen = [make for name, make in cases(options.device) if (options.only or "") in name]
    return run_cases(chosen, rounds=min(options.rounds, 5))
