"""A teacher's most probable words, on disk, so that it runs once and not beside the student.

    of each token   k words, their probabilities at the temperature, and what is left to all others

    loss = T^2 (sum over k of p (ln p - ln q) + rest (ln rest - ln(1 - sum of q)))

All other words count as one, which has the remaining mass: without it the student would be pushed
to give them nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyops.distill.batch import Batch, call_model
from pyops.distill.teacher import check_teacher
from pyops.tensor_parallel import LinearLogits

__all__ = ["StoredLogits", "read_logits", "stored_divergence", "write_logits"]

INDEX = "logits.json"


@dataclass(frozen=True)
class StoredLogits:
    """What a teacher says of a batch of tokens."""

    words: Tensor
    """int32 [..., k], the most probable words, the most probable one first."""
    log_probabilities: Tensor
    """fp16 [..., k], of these words at the temperature, in nats."""
    rest: Tensor
    """fp32 [...], the probability of all other words together."""
    temperature: float
    """T, by which the teacher's logits were divided."""


def write_logits(
    teacher: nn.Module,
    batches: Iterable[Batch],
    folder: str | Path,
    *,
    top: int = 64,
    temperature: float = 1.0,
) -> int:
    """Run a teacher over batches and keep its most probable words, a file for each batch.

    Args:
        teacher: frozen (`freeze`); it returns logits [..., V], or an object that has them.
        batches: what it is called with, in the order in which the student will see them.
        folder: where to write; it is made, and must hold no stored logits.
        top: k, number of words to keep.
        temperature: T, that of the student's loss.

    Returns:
        How many batches were written.

    Raises:
        ValueError: top above the vocabulary or below 1, a temperature that is not above 0, a
            teacher that is not frozen.
        FileExistsError: the folder holds stored logits already.
    """
    check_teacher(teacher)
    if top < 1:
        raise ValueError(f"top is {top}; keep 1 word or more")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; give a number above 0")
    target = Path(folder)
    if (target / INDEX).exists():
        raise FileExistsError(f"{target} holds stored logits already; choose another folder")
    hashes = []
    for number, batch in enumerate(batches):
        with torch.no_grad():
            found = call_model(teacher, batch)
        logits = found if isinstance(found, Tensor) else found.logits
        if top > logits.shape[-1]:
            raise ValueError(f"top is {top}; the teacher has {logits.shape[-1]} words")
        target.mkdir(parents=True, exist_ok=True)
        save_file(
            _most_probable(logits, top, temperature), target / f"batch_{number:06d}.safetensors"
        )
        hashes.append(_hash(batch))
    target.mkdir(parents=True, exist_ok=True)
    index = {"temperature": temperature, "top": top, "batches": hashes}
    (target / INDEX).write_text(json.dumps(index))
    return len(hashes)


def _most_probable(logits: Tensor, top: int, temperature: float) -> dict[str, Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    values, words = log_p.topk(top, dim=-1)
    kept = values.half()
    # What the fp16 numbers leave, so that the mass sums to 1 as it is read.
    rest = (1 - kept.double().exp().sum(-1)).clamp(min=0.0)
    return {
        "words": words.int().contiguous(),
        "log_probabilities": kept.contiguous(),
        "rest": rest.float().contiguous(),
    }


def read_logits(
    folder: str | Path, batches: Iterable[Batch] | None = None
) -> Iterator[StoredLogits]:
    """What `write_logits` wrote, batch by batch.

    Args:
        batches: those that the student sees, to be checked; None: they are not.

    Raises:
        FileNotFoundError: the folder holds no stored logits.
        ValueError: a batch is another one than the teacher saw, or there are fewer.
    """
    source = Path(folder)
    if not (source / INDEX).exists():
        raise FileNotFoundError(f"{source} holds no stored logits; write them with write_logits")
    index = json.loads((source / INDEX).read_text())
    given = iter(batches) if batches is not None else None
    for number, expected in enumerate(index["batches"]):
        if given is not None:
            batch = next(given, None)
            if batch is None:
                raise ValueError(
                    f"batches end after {number}, but the teacher of {source} saw "
                    f"{len(index['batches'])}; give as many, or None to check none"
                )
            if _hash(batch) != expected:
                raise ValueError(
                    f"batch {number} is another than the teacher of {source} saw; give the same "
                    "tokens in the same order, of the same tokenizer"
                )
        tensors = load_file(source / f"batch_{number:06d}.safetensors")
        yield StoredLogits(**tensors, temperature=float(index["temperature"]))


def _hash(batch: Batch) -> str:
    tensors = {"": batch} if isinstance(batch, Tensor) else dict(batch)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def stored_divergence(
    student: LinearLogits,
    stored: StoredLogits,
    targets: Tensor | None = None,
    *,
    reduction: str = "mean",
    chunk_tokens: int = 1024,
) -> Tensor:
    """The forward divergence of a student from stored words, T^2 KL(teacher, student), where all
    words that are not stored count as one.

    The student's logits exist for a chunk of tokens at a time; backward computes them again.

    Args:
        student: [..., H] hidden states and the whole last layer.
        stored: of the same tokens.
        targets: [...], of which -100 does not count; None: all count.
        reduction: "mean" over the tokens that count, or "sum".
        chunk_tokens: number of tokens whose logits exist at a time.

    Raises:
        ValueError: stored words of other tokens, a word that is none of the student's.
    """
    if stored.words.shape[:-1] != student.hidden.shape[:-1]:
        raise ValueError(
            f"stored words are of {list(stored.words.shape[:-1])} tokens, the student's hidden "
            f"states of {list(student.hidden.shape[:-1])}"
        )
    highest = int(stored.words.max()) if stored.words.numel() else 0
    if highest >= len(student.weight):
        raise ValueError(
            f"stored word {highest} is none of the student's {len(student.weight)}; the teacher "
            "had another vocabulary"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; choose one of mean, sum")
    hidden = student.hidden.reshape(-1, student.hidden.shape[-1])
    words = stored.words.reshape(len(hidden), -1).long()
    log_p = stored.log_probabilities.reshape(words.shape)
    rest = stored.rest.reshape(-1)
    counts = torch.ones(len(hidden), device=hidden.device)
    if targets is not None:
        counts = (targets.reshape(-1) != -100).float()
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for start in range(0, len(hidden), chunk_tokens):
        span = slice(start, start + chunk_tokens)
        of_chunk = checkpoint(
            _of_chunk,
            hidden[span],
            student.weight,
            student.bias,
            (words[span], log_p[span], rest[span]),
            stored.temperature,
            use_reentrant=False,
        )
        total = total + (of_chunk * counts[span]).sum()
    return total if reduction == "sum" else total / counts.sum()


def _of_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    said: tuple[Tensor, Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """[n], the divergence of each token."""
    words, kept, rest = said
    z = nn.functional.linear(hidden, weight, bias)
    z = (z if z.dtype == torch.float64 else z.float()) / temperature
    log_q = z.gather(1, words) - z.logsumexp(1, keepdim=True)
    log_p = kept.to(z.dtype)
    tiny = torch.finfo(z.dtype).tiny
    # 1 - sum of q loses its digits where q is nearly all: the smallest step of 1 is its floor.
    others = (1 - log_q.exp().sum(1)).clamp(min=torch.finfo(z.dtype).eps)
    left = rest.to(z.dtype)
    of_rest = torch.where(left > 0, left * (left.clamp(min=tiny).log() - others.log()), 0.0)
    return temperature**2 * ((log_p.exp() * (log_p - log_q)).sum(1) + of_rest)
