"""A Hugging Face folder so small that a test can train it: a Llama of letters, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.tiny_transformers import VOCAB, make_model

tokenizers = pytest.importorskip("tokenizers")

__all__ = ["CHAT", "END", "LETTERS", "SPECIAL", "make_folder", "make_tokenizer", "write_chat"]

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?+=\n"
END = "</s>"
SPECIAL = ("<s>", END, "<pad>", "<user>", "<bot>", "<?>")
CHAT = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}<bot>{{ m.content }}{{ eos_token }}"
    "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_tokenizer(folder: Path, *, begins: bool = True, more: int = 0) -> None:
    """Each letter is a token.

    Args:
        folder: Where it is written.
        begins: Whether <s> begins a text.
        more: How many tokens there are beside.
    """
    words = [*SPECIAL, *LETTERS, *(f"more{i}" for i in range(more))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<?>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens(list(SPECIAL))
    made.decoder = tokenizers.decoders.Fuse()
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    # What another program left there is not heeded.
    made.enable_truncation(4)
    made.enable_padding(length=4)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": END},
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_folder(folder: Path, *, chat: str | None = None, **config: object) -> Path:
    """The folder.

    Args:
        folder: Where it is written.
        chat: Its chat template.
        config: Fields of the model's config that are to be others.
    """
    assert len(SPECIAL) + len(LETTERS) <= VOCAB
    make_model("llama", **{"eos_token_id": 1, **config}).save_pretrained(folder)
    make_tokenizer(folder)
    if chat is not None:
        (folder / "chat_template.jinja").write_text(chat)
    return folder


def write_chat(path: Path, *, rows: int) -> Path:
    """Instructions of different lengths, of which something can be learnt."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{i}+1=?"},
                {"role": "assistant", "content": f"{i + 1}" + ", right" * (i % 3)},
            ]
        }
        if i % 2
        else {"prompt": f"{i}+2=?", "response": f"{i + 2}"}
        for i in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
