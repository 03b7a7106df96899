"""What `pyops generate` and `pyops eval` do with a Hugging Face folder, on any layout of the ranks.

text = continued("llama-folder", "To be, or", UseOptions(tp=2), max_new_tokens=20)
scored = evaluated("llama-folder", "held_out.jsonl", UseOptions())
scored.loss, scored.perplexity
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyops.comm.agreement import ranks_agree
from pyops.config import ConfigError, TrainConfig
from pyops.data import DataConfig
from pyops.data.folder_text import RowOptions, RowShare, held_out_batches, prepare_rows
from pyops.parallel import ParallelPlan, Trainer
from pyops.parallel.generation import GenerationOptions
from pyops.train.host.ranks import joined_ranks
from pyops.train.pretrained.folder_model import FolderModel

__all__ = ["Scored", "UseOptions", "continued", "evaluated"]


@dataclass(frozen=True)
class UseOptions:
    """How the ranks share a folder's model out."""

    tp: int = 1
    """Ranks that cut each layer among them."""

    pp: int = 1
    """Ranks that hold different blocks."""

    precision: str = "fp32"
    """What the model computes in: "fp32", "bf16" or "fp16"."""

    device: str = "auto"
    """"auto" is cuda where there is one; "cpu" or "cuda"."""

    def trainer(self, model: FolderModel, device: torch.device) -> Trainer:
        """The model, shared out. A collective.

        Args:
            model: Of the folder.
            device: Of this rank.

        Raises:
            ConfigError: On every rank alike, for a layout that does not fit.
        """
        plan = ParallelPlan(tp=self.tp, pp=self.pp, precision=self.precision)
        return model.trainer(plan, optimizer=None, device=device)


@dataclass(frozen=True)
class Scored:
    """What a model makes of a text."""

    loss: float
    """Nats per token that counts."""

    num_tokens: int
    """How many tokens count."""

    num_rows: int
    """In how many rows they are."""

    num_truncated: int
    """How many rows of instructions were cut."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def continued(
    folder: str, prompt: str, options: UseOptions, *, chat: bool = False, **generation: Any
) -> str:
    """A text, continued by the folder's model. A collective of the ranks that torchrun started, if
    any.

    Args:
        folder: Of a causal language model, with its tokenizer.
        prompt: The text.
        options: How the ranks share the model out.
        chat: Whether the prompt is a message of the user, written by the folder's chat template.
        generation: Fields of `pyops.parallel.generation.GenerationOptions`.

    Returns:
        The prompt and what follows it; with `chat` the answer alone. On every rank.

    Raises:
        ConfigError, CorpusError: On every rank alike, for what the user can put right.
    """
    with joined_ranks(TrainConfig(device=options.device)) as device:
        model = FolderModel.read(folder)
        with ranks_agree():
            chosen = _checked(generation)
            tokens = _prompt_tokens(model, prompt, chat=chat)
            length = tokens.shape[1] + chosen.max_new_tokens
            model.check_length(
                length,
                f"the prompt of {tokens.shape[1]} tokens and max_new_tokens "
                f"{chosen.max_new_tokens} are {length} tokens",
                "give less of one of them",
            )
        trainer = options.trainer(model, device)
        given = {"eos_token_id": model.eos_token_ids or None, **generation}
        found = trainer.generate(tokens.to(device), **given)[0].tolist()
        shown = model.tokenizer.decode(found)
        if not chat:
            return shown
        return shown[len(model.tokenizer.decode(tokens[0].tolist())) :].strip()


def _checked(generation: dict[str, Any]) -> GenerationOptions:
    try:
        chosen = GenerationOptions(**generation)
        chosen.validate()
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    return chosen


def _prompt_tokens(model: FolderModel, prompt: str, *, chat: bool) -> torch.Tensor:
    """int64 [1, T]"""
    tokenizer = model.tokenizer
    if not chat:
        found = tokenizer.encode(prompt)
    elif tokenizer.chat_template is None:
        raise ConfigError(
            f"--chat writes the prompt by a chat template, and {model.folder} has none; leave "
            "--chat out, or put a chat_template.jinja there"
        )
    else:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.chat_template.render(messages, add_generation_prompt=True)
        found = tokenizer.encode(text, begins=False)
    if not len(found):
        raise ConfigError(f"the prompt {prompt!r} has no tokens; give some text to be continued")
    return torch.from_numpy(found)[None]


def evaluated(
    folder: str,
    path: Path | str,
    options: UseOptions,
    *,
    rows: RowOptions,
    batch: int = 8,
    cache: str = DataConfig.cache,
) -> Scored:
    """How well the folder's model predicts a text, or what the assistant says in instructions. A
    collective of the ranks that torchrun started, if any.

    Args:
        folder: Of a causal language model, with its tokenizer.
        path: Files of text, or .jsonl of instructions.
        options: How the ranks share the model out.
        rows: How the text becomes rows, of which the first token counts nowhere.
        batch: Rows at a time, of each copy of the model.
        cache: The folder for tokens.

    Returns:
        The score, on every rank; the same on every layout.

    Raises:
        ConfigError, CorpusError: On every rank alike, for what the user can put right.
    """
    with joined_ranks(TrainConfig(device=options.device)) as device:
        model = FolderModel.read(folder)
        with ranks_agree():
            model.check_length(
                rows.sequence_length,
                f"sequence_length is {rows.sequence_length}",
                "make it smaller",
            )
            if batch < 1:
                raise ConfigError(f"batch is {batch}; it must be 1 or more")
            data = DataConfig(path=str(path), cache=cache)
        found = prepare_rows(data, model.tokenizer, rows)
        trainer = options.trainer(model, device)
        share = RowShare(
            batch * trainer.mesh.size("dp"),
            rows.sequence_length,
            model.tokenizer.pad_token_id,
            trainer.mesh.rank("dp"),
            trainer.mesh.size("dp"),
        )
        loss = trainer.evaluate(
            {key: value.to(device) for key, value in each.items()}
            for each in held_out_batches(found, range(len(found)), share)
        )
        return Scored(loss, found.num_learnt, len(found), found.num_truncated)
