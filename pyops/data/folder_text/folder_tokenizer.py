"""FolderTokenizer: the tokenizer of a Hugging Face folder.

tokenizer.json                                the tokens, run by the package tokenizers
tokenizer_config.json, special_tokens_map.json    which of them ends a text
chat_template.jinja (or in tokenizer_config.json)    how messages become text
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyops.data.corpus import CorpusError
from pyops.data.folder_text.chat_template import ChatTemplate, Span

__all__ = ["FolderTokenizer", "Learnt"]

FILE = "tokenizer.json"


@dataclass(frozen=True)
class Learnt:
    """Tokens of a text, and which of them are learnt."""

    tokens: np.ndarray
    """[n], whole numbers."""

    learns: np.ndarray
    """[n], bool."""

    @property
    def teaches(self) -> bool:
        """Whether a token is learnt from those before it."""
        return bool(self.learns[1:].any())


class FolderTokenizer:
    """Text to tokens and back.

    Args:
        folder: That transformers saved a tokenizer in.

    Attributes:
        vocab_size: The largest token and one: a model needs as many.
        eos_token_id: Ends a text; None where the folder names no such token.
        pad_token_id: Stands where a row has no more text; it is never learnt.
        chat_template: None where the folder has none.
        digest: Of all that decides on the tokens.

    Raises:
        CorpusError: The folder has no tokenizer.json, or a damaged one.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        text = _read(self.folder / FILE)
        if text is None:
            others = sorted(
                path.name
                for path in self.folder.glob("*")
                if path.suffix == ".model" or path.name in ("vocab.json", "vocab.txt")
            )
            has = f" ({', '.join(others)} alone is not read)" if others else ""
            raise CorpusError(
                f"{self.folder} has no {FILE}{has}; put one there: "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        self._inner = _of_json(text, self.folder / FILE)
        # What is cut or filled up is decided where rows are made.
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = 1 + max(self._inner.get_vocab().values(), default=-1)
        settings = _settings(self.folder)
        special = _special_tokens(settings, self.folder)
        self.eos_token_id = self._id_of(special.get("eos_token"))
        pad = self._id_of(special.get("pad_token"))
        end = self.eos_token_id if self.eos_token_id is not None else 0
        self.pad_token_id: int = pad if pad is not None else end
        source = _template(settings, self.folder)
        self.chat_template = None if source is None else ChatTemplate(source, special)
        parts = (text, source, json.dumps(special, sort_keys=True))
        self.digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def _id_of(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._inner.token_to_id(token)
        return found

    @property
    def tokens(self) -> dict[str, int]:
        """The number of each token."""
        found: dict[str, int] = self._inner.get_vocab()
        return found

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a model that lacks some of the tokens.

        Args:
            vocab_size: Of the model.

        Raises:
            CorpusError: The tokenizer has more tokens.
        """
        if self.vocab_size > vocab_size:
            raise CorpusError(
                f"{self.folder / FILE} has {self.vocab_size} tokens, but the model has embeddings "
                f"of {vocab_size} (vocab_size in config.json); take the model's own tokenizer, or "
                "enlarge the model: resize_token_embeddings of transformers"
            )

    def encode(self, text: str, *, begins: bool = True) -> np.ndarray:
        """The tokens of a text, [n].

        Args:
            text: The text.
            begins: Whether the tokens are there that this tokenizer puts around a text, such as the
                one that begins it.
        """
        ids = self._inner.encode(text, add_special_tokens=begins).ids
        return np.asarray(ids, dtype=np.int64)

    def encode_learnt(self, text: str, spans: Sequence[Span], *, begins: bool) -> Learnt:
        """The tokens of a text of which parts are learnt.

        Args:
            text: The text, cut into tokens as a whole.
            spans: Characters that are learnt. A token that has some of them is learnt.
            begins: As of `encode`.
        """
        encoding = self._inner.encode(text, add_special_tokens=begins)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        learns = np.zeros(len(offsets), dtype=bool)
        for start, end in spans:
            # Tokens that are put around a text lie at (0, 0), and are not learnt.
            learns |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return Learnt(np.asarray(encoding.ids, dtype=np.int64), learns)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of these tokens, special ones left out."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))


def _read(path: Path) -> str | None:
    """The file's text; None where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} can't be read ({error}); fetch it again") from None


def _of_json(text: str, path: Path) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise CorpusError(f"{path} needs the package tokenizers: pip install tokenizers") from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises Exception itself
        raise CorpusError(f"{path} is no tokenizer ({error}); fetch it again") from None


def _settings(folder: Path) -> dict[str, Any]:
    """What special_tokens_map.json and tokenizer_config.json say, the latter first."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        text = _read(folder / name)
        if text is None:
            continue
        try:
            values = json.loads(text)
        except ValueError as error:
            raise CorpusError(f"{folder / name} is no JSON ({error}); fetch it again") from None
        if not isinstance(values, dict):
            raise CorpusError(f"{folder / name} holds no object; fetch it again")
        found |= {key: value for key, value in values.items() if value is not None}
    return found


def _special_tokens(settings: dict[str, Any], folder: Path) -> dict[str, str]:
    """{"eos_token": "</s>", ...}"""
    found = {}
    for key, value in settings.items():
        if not key.endswith("_token"):
            continue
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            found[key] = token
    return found


def _template(settings: dict[str, Any], folder: Path) -> str | None:
    own = _read(folder / "chat_template.jinja")
    if own is not None:
        return own
    given = settings.get("chat_template")
    if isinstance(given, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get("default")
    if given is not None and not isinstance(given, str):
        raise CorpusError(
            f"{folder / 'tokenizer_config.json'} has a chat_template that is no text; write the "
            "template there, or into chat_template.jinja"
        )
    return given
