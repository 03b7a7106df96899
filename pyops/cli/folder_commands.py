"""`pyops generate` and `pyops eval`: a Hugging Face folder continues a text, or is scored on one.

$ pyops generate llama-tuned --prompt "To be, or" --max-new-tokens 8
To be, or not to be, that is the
$ torchrun --standalone --nproc-per-node 2 -m pyops eval llama-tuned --data held_out.txt --tp 2
loss 1.2345 nats per token, perplexity 3.4367: 10,220 tokens in 20 rows of held_out.txt
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyops.train.pretrained.folder_use import UseOptions

__all__ = ["add_eval", "add_generate", "answer", "score"]


def add_generate(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops generate`."""
    _add_layout(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what is continued")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a message, written by the folder's chat template; print the answer",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=100, metavar="N", help="at most so many (100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token, more draws one (0)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest; 0: all (0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="then among the likeliest whose probabilities sum up to P; 1: all (1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")


def add_eval(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops eval`."""
    _add_layout(parser)
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="text, or .jsonl of instructions; a file or a folder of them",
    )
    parser.add_argument(
        "--sequence-length", type=int, default=512, metavar="N", help="tokens of a row (512)"
    )
    parser.add_argument(
        "--long-rows",
        choices=["refuse", "truncate"],
        default="refuse",
        help="instructions of more tokens (refuse)",
    )
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="rows at a time, of each model (8)"
    )
    parser.add_argument(
        "--cache", default="runs/data", metavar="FOLDER", help="for tokens (runs/data)"
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="a Hugging Face folder, with tokenizer")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="ranks that cut each layer (1)"
    )
    parser.add_argument(
        "--pp", type=int, default=1, metavar="N", help="ranks that hold different blocks (1)"
    )
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def _layout(given: argparse.Namespace) -> UseOptions:
    from pyops.compress import use_of

    return use_of(
        given.folder, tp=given.tp, pp=given.pp, precision=given.precision, device=given.device
    )


def answer(given: argparse.Namespace) -> str:
    """What `pyops generate` prints.

    Args:
        given: The arguments.

    Raises:
        ConfigError, CorpusError: On every rank alike, for what the user can put right.
    """
    from pyops.train.pretrained.folder_use import continued

    generation: dict[str, Any] = {
        name: getattr(given, name)
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    }
    return continued(given.folder, given.prompt, _layout(given), chat=given.chat, **generation)


def score(given: argparse.Namespace) -> str:
    """What `pyops eval` prints.

    Args:
        given: The arguments.

    Raises:
        ConfigError, CorpusError: On every rank alike, for what the user can put right.
    """
    from pyops.data.folder_text import RowOptions
    from pyops.train.pretrained.folder_use import evaluated

    rows = RowOptions(given.sequence_length, given.long_rows, keeps_rest=True)
    found = evaluated(
        given.folder, given.data, _layout(given), rows=rows, batch=given.batch, cache=given.cache
    )
    cut = f"; {found.num_truncated:,} longer rows were cut" if found.num_truncated else ""
    return (
        f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.4f}: "
        f"{found.num_tokens:,} tokens in {found.num_rows:,} rows of {given.data}{cut}"
    )
