"""generate: texts that follow prompts, of any length, on any layout of the ranks.

    prompts -> rows of the caches -> blocks -> logits of the last tokens -> a token for each row
                    ^                                                                |
                    '---- a row that ends is handed to the next prompt --------------'

Over a pipeline the rows are as many groups as there are stages, so that all stages compute:

    stage 0   group 0 | group 1 | group 0 | group 1        hidden states go to the next stage,
    stage 1           | group 0 | group 1 | group 0        chosen tokens from the last to the first
"""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import check_same, gather, ranks_agree
from pyops.given_numbers import is_whole
from pyops.mesh import ALONE
from pyops.models.generation.choosing import candidates_of, choose, draws
from pyops.models.generation.decoders import Decoder, decoder_of
from pyops.models.generation.options import GenerateOptions
from pyops.models.generation.rows import GeneratedRow, Job, PromptQueue, RowGroup, Text
from pyops.models.generation.stages import Stages
from pyops.tensor_parallel import Ranks, RanksLike, RowSpan

__all__ = ["computing", "generate"]

Prompt = Tensor | Sequence[int]


def generate(
    model: nn.Module, prompts: Iterable[Prompt], *, pipe: RanksLike = ALONE, **options: Any
) -> Iterator[GeneratedRow]:
    """The texts that follow prompts, in the order of the prompts, each as soon as it and those
    before it have ended.

    Each token is computed once: keys and values are kept. A row's tokens depend neither on the
    other rows nor on how the ranks share the model out (but for rounding). A collective of the
    ranks that share the model: all are given the same, and take all results. The model computes as
    in eval mode meanwhile.

    Args:
        model: GPT, or T5, whose encoder reads the prompts; made by pyops.hub, for example.
        prompts: The tokens of each, one or more: tensors [T], or any sequences of whole numbers.
            They may be an iterator, from which a prompt is taken when there is a row for it.
        pipe: The ranks that hold the stages of a GPT, in order, each with its layers alone
            (`keep_layers`); by default this process has all of them.
        options: Fields of `GenerateOptions`: max_new=128, temperature=0.8, top_k=0, top_p=1.0,
            seed=0, end=None, rows=16, first_row=0, chunk=512, cache_dtype=None.

    Returns:
        An iterator of `GeneratedRow`: number, prompt, tokens, log_likelihood, ended.

    Raises:
        ValueError: On every rank alike, for options without sense, a prompt without tokens, or one
            that with `max_new` is longer than the model's sequence_length; while it computes, for
            logits that are not finite.
        TypeError: For a model that predicts no next token, prompts that are no whole numbers, and
            unknown options.
    """
    stages = Ranks.of(pipe)
    with _agreed(stages), _agreed(_sharing(model)):
        chosen = GenerateOptions(**options)
        chosen.validate()
        shares = _shares(chosen.rows, stages.size, prompts)
        decoder = decoder_of(model, shares, chosen.cache_dtype)
        if decoder.cut and stages.size == 1:
            raise ValueError(
                "generate: this rank has only some of the model's layers; give pipe=, the ranks "
                "that hold its stages"
            )
        _check_words(decoder, chosen.ends, "end is")
        given: Iterable[Any] = _listed(prompts)
        if isinstance(prompts, Sized):
            given = [_tokens(decoder, i, p, chosen) for i, p in enumerate(given)]
    for ranks in (stages, _sharing(model)):
        if isinstance(given, list) and ranks.size > 1:
            texts = {"prompts": str(given), "options": str(chosen)}
            check_same(texts, group=ranks.group, who="generate")
    if stages.size > 1:
        _check_stages(decoder, stages)
    return _Run(decoder, chosen, stages, shares).rows(given)


def _check_stages(decoder: Decoder, stages: Ranks) -> None:
    """ValueError on every rank unless the stages make up the model."""
    if not decoder.num_blocks:
        raise ValueError(
            f"generate: {type(decoder.model).__name__} is not cut into stages; leave pipe out"
        )
    own = decoder.own_blocks
    found = gather(own, group=stages.group)
    whole = [number for stage in found for number in stage]
    if whole != list(range(len(whole))) or len(whole) != decoder.num_blocks:
        raise ValueError(
            f"generate: the stages have the blocks {found} of {decoder.num_blocks}; let each keep "
            "its own alone, in order (keep_layers)"
        )


def _sharing(model: nn.Module) -> Ranks:
    """The ranks that share the model's layers; this one alone for models of others."""
    found = getattr(getattr(model, "layout", None), "ranks", None)
    return found if isinstance(found, Ranks) else Ranks.of(ALONE)


def _agreed(ranks: Ranks) -> AbstractContextManager[None]:
    return ranks_agree(ranks.group) if ranks.size > 1 else nullcontext()


def _shares(rows: int, stages: int, prompts: Any) -> list[int]:
    """How many rows each group has; no more than there are prompts, where that is known."""
    if rows < stages:
        warnings.warn(
            f"generate: rows is {rows}, but there are {stages} stages, of which {stages - rows} "
            f"wait at any time; give {stages} rows or more",
            stacklevel=3,
        )
    if isinstance(prompts, Sized):
        rows = min(rows, max(stages, len(prompts)))
    return [rows // stages + (i < rows % stages) for i in range(min(stages, rows))]


def _listed(prompts: Any) -> Iterable[Any]:
    """The prompts, if they are something that prompts are taken from one after the other."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"generate: prompts is {reprlib.repr(prompts)}; give a list of prompts, each the "
            "numbers of its tokens"
        )
    return prompts


def _whole_numbers(number: int, prompt: Any) -> list[int]:
    """A prompt's tokens, whatever holds them."""
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or not _holds_whole_numbers(prompt):
            raise ValueError(
                f"generate: prompt {number} is {prompt.dtype} {list(prompt.shape)}; give whole "
                "numbers [T], one prompt for each row"
            )
        return [int(token) for token in prompt.tolist()]
    if isinstance(prompt, str | Mapping) or not isinstance(prompt, Iterable):
        raise TypeError(
            f"generate: prompt {number} is {reprlib.repr(prompt)}; give the numbers of its tokens, "
            "a list of them for each prompt"
        )
    tokens = list(prompt)
    for token in tokens:
        if not is_whole(token):
            raise TypeError(
                f"generate: prompt {number} has {reprlib.repr(token)}, which is no token; give "
                "whole numbers"
            )
    return [int(token) for token in tokens]


def _holds_whole_numbers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _check_words(decoder: Decoder, tokens: Iterable[int], what: str) -> None:
    words = decoder.model.config.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < words]:
        raise ValueError(f"generate: {what} {wrong[0]}, outside the vocabulary of {words}")


def _tokens(decoder: Decoder, number: int, prompt: Any, options: GenerateOptions) -> list[int]:
    """A prompt's tokens."""
    tokens = _whole_numbers(number, prompt)
    if not tokens:
        raise ValueError(
            f"generate: prompt {number} has no tokens; begin it with the model's start token"
        )
    _check_words(decoder, tokens, f"prompt {number} has the token")
    most = decoder.most_places
    if most is not None and len(tokens) + options.max_new > most:
        raise ValueError(
            f"generate: prompt {number} of {len(tokens)} tokens and max_new {options.max_new} are "
            f"{len(tokens) + options.max_new} tokens, but the model's sequence_length is {most}; "
            "give less of one of them"
        )
    return tokens


@contextmanager
def computing(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode, nothing is kept for backward, and every rank of context
    parallelism has all tokens of its rows.

    Args:
        model: Any.
    """
    training = model.training
    model.eval()
    whole = getattr(model, "whole_rows", nullcontext)
    try:
        with torch.no_grad(), whole():
            yield
    finally:
        model.train(training)


class _Run:
    """One call of `generate`."""

    def __init__(
        self, decoder: Decoder, options: GenerateOptions, stages: Ranks, shares: Sequence[int]
    ) -> None:
        self.decoder, self.options, self.stages = decoder, options, Stages(stages)
        self.groups = [
            RowGroup(i, n, max_new=options.max_new, ends=options.ends, chunk=options.chunk)
            for i, n in enumerate(shares)
        ]
        self.longest = 0  # prompt, where it is known

    def rows(self, prompts: Iterable[Any]) -> Iterator[GeneratedRow]:
        """The rows in order."""
        checked = isinstance(prompts, list)
        if isinstance(prompts, list):
            begun = (self.decoder.begins_with(prompt) for prompt in prompts)
            self.longest = max(map(len, begun), default=0)
        queue = PromptQueue(iter(prompts), lambda i, prompt: self._text(i, prompt, checked))
        waiting: dict[int, GeneratedRow] = {}
        following = self.options.first_row
        turns = self._turns(queue)
        running = True
        while running:
            # The model is in eval mode, and nothing kept for backward, until a row is handed out.
            with computing(self.decoder.model), self._inference():
                self.decoder.prepare()
                while running and following not in waiting:
                    ended = next(turns, None)
                    running = ended is not None
                    waiting.update((row.number, row) for row in ended or ())
            while following in waiting:
                yield waiting.pop(following)
                following += 1

    def _inference(self) -> AbstractContextManager[None]:
        """One process needs nothing of autograd's; what threads of collectives write must be
        tensors of every mode."""
        alone = self.stages.count == self.decoder.ranks.size == 1
        return torch.inference_mode() if alone else nullcontext()

    def _turns(self, queue: PromptQueue) -> Iterator[list[GeneratedRow]]:
        """What ended with the turn before, of each turn of each group."""
        before: list[Tensor | None] = [None] * len(self.groups)
        running = True
        while running:
            running = False
            for group in self.groups:
                ended = self._take(group, before[group.number])
                before[group.number] = self._turn(group, queue)
                running |= bool(group.texts)
                yield ended
        self.stages.finish()

    def _text(self, number: int, prompt: Any, checked: bool) -> Text:
        options = self.options
        if not checked:
            prompt = _tokens(self.decoder, number, prompt, options)
        begin, row = self.decoder.begins_with(prompt), options.first_row + number
        uniform = None
        if options.temperature > 0:
            uniform = draws(options.seed, row, len(begin), options.max_new)
        return Text(row, prompt, begin, uniform)

    def _take(self, group: RowGroup, own: Tensor | None) -> list[GeneratedRow]:
        """The tokens that were chosen in the turn before."""
        if not group.texts:
            return []
        like = torch.empty(len(group.texts), 2, dtype=torch.float64, device=self.decoder.device)
        words, log_likelihoods = self.stages.chosen(own, like=like).cpu().unbind(1)
        for text, found in zip(group.texts, log_likelihoods.tolist(), strict=True):
            if not math.isfinite(found):
                raise ValueError(
                    f"generate: the logits of row {text.number} are not finite behind "
                    f"{len(text.begin) + len(text.tokens)} tokens; a weight of the model is nan or "
                    "too large: load an earlier checkpoint"
                )
        return group.take(
            words.long().tolist(),
            log_likelihoods.tolist(),
            lambda source, target: self.decoder.move(group.number, source, target),
        )

    def _turn(self, group: RowGroup, queue: PromptQueue) -> Tensor | None:
        """One token for every text of a group; on the last stage those tokens."""
        for row in group.admit(queue):
            self.decoder.read(group.number, row, group.texts[row].prompt)
        found = [self._job(group, job) for job in group.jobs()]
        chosen = [each for each in found if each is not None]
        if not chosen:
            return None
        result = torch.cat(chosen)
        if self.stages.count > 1:
            result = result.to(self.decoder.device)
            self.stages.announce(result)
        return result

    def _job(self, group: RowGroup, job: Job) -> Tensor | None:
        """[R, 2], tokens and their ln p, on the last stage."""
        decoder, stages, options = self.decoder, self.stages, self.options
        texts = group.texts[job.row : job.row + len(job.tokens)]
        most = max(len(text.begin) for text in texts)
        span = RowSpan(
            job.row,
            job.lengths,
            len(job.tokens[0]),
            reserve=max(self.longest, most) + options.max_new,
            device=decoder.device,
        )
        tokens_RT = torch.tensor(job.tokens, device=decoder.device)
        shape = (tokens_RT.shape[0], tokens_RT.shape[1])
        x = None if stages.first else stages.receive(decoder.empty(shape))
        x = decoder.hidden(group.number, span, tokens_RT, x)
        if not stages.last:
            stages.send(x)
        if not stages.last or not job.chooses:
            return None
        words, first = decoder.vocabulary
        found = candidates_of(
            decoder.logits(x, shape),
            decoder.ranks,
            vocab_size=words,
            first_word=first,
            most=options.most,
        )
        uniform = [0.0 if t.uniform is None else float(t.uniform[len(t.tokens)]) for t in texts]
        chosen = choose(found, options, torch.tensor(uniform, dtype=torch.float64))
        return torch.stack([chosen.words_R.double(), chosen.log_likelihood_R], dim=1)
