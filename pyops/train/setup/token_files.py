"""TokenData: files of tokens, mixed, as a run trains on them; PythonData: batches of a function of
the user's.

data.paths   a | b        data.weights 0.7, 0.3
             a b a a b a a ...                  rows, packed or not, in an order of their own
             global batch of step 0, 1, ...     made ahead by a thread
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import check_same, on_all_ranks, ranks_agree
from pyops.config import Config
from pyops.data import CorpusError
from pyops.mesh import Mesh
from pyops.token_data import (
    Prefetched,
    RankStates,
    Rows,
    SequenceRows,
    TokenBatches,
    Tokens,
    TokenSource,
    UserBatches,
    held_out_rows,
    open_tokens,
    packed_rows,
)
from pyops.train.setup.text_data import RunText

__all__ = ["PythonData", "TokenData", "open_paths"]


class CountedTokens:
    """A `pyops.data.Tokenizer` for tokens that are there already: losses are per token.

    Args:
        vocab_size: Of the model.
        file: tokenizer.json of the tokens; None, or of a file that is not there: text is shown as
            numbers.
    """

    def __init__(self, vocab_size: int, file: Path | None = None) -> None:
        self.vocab_size, self._inner = vocab_size, None
        if file is not None and file.exists() and importlib.util.find_spec("tokenizers"):
            import tokenizers

            self._inner = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: bytes) -> np.ndarray:
        """Nothing is tokenized in a run over files of tokens."""
        raise NotImplementedError("the tokens are there already")

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, or the numbers where no tokenizer is known."""
        found = list(tokens)
        if self._inner is None:
            return " ".join(map(str, found))
        return str(self._inner.decode(found))

    def token_bytes(self, tokens: np.ndarray) -> int:
        """How many tokens there are, which stand in for bytes."""
        return int(tokens.size)


class TokenData(RunText):
    """Files of tokens as a run trains on them."""

    unit = "nats per token"

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Open the files, and find this rank's part of them.

        Raises:
            CorpusError: They can't be used, on every rank alike.
        """
        data, options, length = config.data, config.train, config.model.sequence_length
        opened = on_all_ranks(partial(open_paths, data.paths, config.model.vocab_size))
        check_same({f"data.paths {each.path}": each.digest for each in opened}, who="[data]")
        rows: Sequence[Rows]
        if data.packing == "documents":
            rows = [packed_rows(each, sequence_length=length, cache=data.cache) for each in opened]
        else:
            rows = on_all_ranks(lambda: [SequenceRows(t, sequence_length=length) for t in opened])
        num_ranks = mesh.size("dp")
        part = {"rank": mesh.rank("dp"), "num_ranks": num_ranks}
        weights = data.weights or [float(len(each)) for each in rows]
        with ranks_agree():
            sources = [
                TokenSource(
                    own, digest=each.digest, weight=weight, held_out=data.validation_fraction
                )
                for own, each, weight in zip(rows, opened, weights, strict=True)
            ]
            batches = TokenBatches(sources, global_batch=options.batch, seed=options.seed, **part)
            self._held_out = held_out_rows(
                sources, num_rows=options.num_validation_sequences, **part
            )
        self.batches = Prefetched(batches, depth=data.prefetch)
        self.num_rows = options.batch // num_ranks
        file = opened[0].path / "tokenizer.json" if opened[0].path.is_dir() else None
        self.tokenizer = CountedTokens(config.model.vocab_size, file)
        total = sum(each.num_tokens for each in opened)
        self.described = f"{total:,} tokens of {', '.join(data.paths)}"


def open_paths(paths: Sequence[str], vocab_size: int) -> list[Tokens]:
    """The files, whose tokens are of one tokenizer and have embeddings in the model.

    Args:
        paths: As of data.paths.
        vocab_size: Of the model.

    Raises:
        CorpusError: They are not.
    """
    found = [open_tokens(path) for path in paths]
    known = [each for each in found if each.tokenizer]
    for each in known[1:]:
        if each.tokenizer != known[0].tokenizer:
            raise CorpusError(
                f"data.paths has tokens of two tokenizers: {known[0].path} was written with "
                f"{known[0].tokenizer}, {each.path} with {each.tokenizer}; write both anew with "
                "one tokenizer.json: pyops data SOURCE... --tokenizer FILE"
            )
    for each in found:
        if each.vocab_size > vocab_size:
            raise CorpusError(
                f"{each.path} has tokens of a vocabulary of {each.vocab_size}, but "
                f"model.vocab_size is {vocab_size}; set it to {each.vocab_size} or more, or write "
                "the tokens with the model's tokenizer"
            )
        # Formats without a vocabulary are compared with the model's, row by row.
        each.vocab_size = each.vocab_size or vocab_size
    return found


class PythonData(RunText):
    """Batches of a function of the user's:

    make(split=, sequence_length=, batch=, rank=, num_ranks=, seed=) -> iterable of batches

    split is "train" or "validation", batch the rows of this rank in each batch; ranks of the same
    number share a model and must get the same rows.
    """

    unit = "nats per token"

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Call the function, and take the held-out rows.

        Raises:
            CorpusError: There is no such function, or it gives no batches; on every rank alike.
        """
        data, options, num_ranks = config.data, config.train, mesh.size("dp")
        self.num_rows = options.batch // num_ranks
        made: dict[str, Any] = {
            "sequence_length": config.model.sequence_length,
            "batch": self.num_rows,
            "rank": mesh.rank("dp"),
            "num_ranks": num_ranks,
            "seed": options.seed,
        }
        with ranks_agree():
            make = _function(data.path)
            stream = UserBatches(make(split="train", **made), name=f"data.path {data.path}")
            held_out = make(split="validation", **made)
            self._held_out = _first_rows(
                UserBatches(held_out, name=f"data.path {data.path}, validation"),
                -(-options.num_validation_sequences // num_ranks),
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.batches = RankStates(Prefetched(stream, depth=data.prefetch), rank=rank)
        self.tokenizer = CountedTokens(config.model.vocab_size)
        self.described = f"batches of {data.path}"


def _first_rows(batches: UserBatches, count: int) -> dict[str, Tensor]:
    """As many rows of the first batches as are held out."""
    parts: list[dict[str, Tensor]] = []
    while sum(len(part["tokens_BT"]) for part in parts) < count:
        parts.append(batches.next())
        if batches.state_dict()["epoch"]:  # fewer than that
            parts.pop()
            break
    return {name: torch.cat([part[name] for part in parts])[:count] for name in parts[0]}


def _function(path: str) -> Callable[..., Iterable[Any]]:
    module, _, name = path.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            assert spec is not None
            assert spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except (ImportError, OSError, SyntaxError) as error:
        raise CorpusError(
            f"data.path is {path!r}, and {module} can't be imported ({error}); name a file or "
            'module, and a function in it, as "my_data.py:make"'
        ) from None
    function: Any = getattr(found, name, None)
    if not callable(function):
        raise CorpusError(
            f"data.path is {path!r}, but {module} has no function {name!r}; name one that makes "
            "batches"
        )
    return function  # type: ignore[no-any-return]
