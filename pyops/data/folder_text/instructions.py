"""Lines of JSON become tokens, and which of them are learnt: those that the assistant says.

    {"prompt": "1+1=", "response": "2"}
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}

With a chat template a prompt and its response are a message of the user and one of the assistant;
without one the response follows the prompt as it stands, and the token that ends a text follows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pyops.data.corpus import CorpusError
from pyops.data.folder_text.chat_template import ChatTemplate
from pyops.data.folder_text.folder_tokenizer import FolderTokenizer, Learnt

__all__ = ["EXPECTED", "learnt_of", "read_lines"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
EXPECTED = (
    '{"prompt": "...", "response": "..."} or {"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}'
)


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of each line that is not blank; the place is file:line.

    Args:
        path: A file of one JSON value in each line, in UTF-8.

    Raises:
        CorpusError: A line is no JSON, or the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                place = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text.strip():
                        yield place, json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise CorpusError(
                        f"{place} is no JSON ({error}); write one object in the line, {EXPECTED}"
                    ) from None
    except OSError as error:
        raise CorpusError(
            f"{path} can't be read: {error.strerror}; fix its permissions, or leave it out"
        ) from None


def learnt_of(row: Any, tokenizer: FolderTokenizer, *, place: str) -> Learnt:
    """The tokens of one row.

    Args:
        row: The value of a line.
        tokenizer: Of the model's folder.
        place: file:line, for messages.

    Raises:
        CorpusError: The row is not as expected, or has nothing to learn from.
    """
    messages = _messages_of(row, place)
    template = tokenizer.chat_template
    if "messages" in row and template is None:
        raise CorpusError(
            f"{place} has messages, but {tokenizer.folder} has no chat template to write them "
            'with; put a chat_template.jinja there, or give rows of {"prompt", "response"}'
        )
    if template is None:
        found = _plain(row["prompt"], row["response"], tokenizer)
    else:
        found = _templated(messages, template, tokenizer, place)
    if not found.teaches:
        raise CorpusError(
            f"{place} has nothing to learn from: the assistant says nothing; leave the row out"
        )
    return found


def _plain(prompt: str, response: str, tokenizer: FolderTokenizer) -> Learnt:
    found = tokenizer.encode_learnt(
        prompt + response, [(len(prompt), len(prompt) + len(response))], begins=True
    )
    end = tokenizer.eos_token_id
    if end is None or not response:
        return found
    if len(found.tokens) and found.tokens[-1] == end:  # this tokenizer ends texts itself
        found.learns[-1] = True
        return found
    return Learnt(np.append(found.tokens, end), np.append(found.learns, True))


def _templated(
    messages: list[dict[str, str]], template: ChatTemplate, tokenizer: FolderTokenizer, place: str
) -> Learnt:
    try:
        text, spans = template.with_spans(messages)
    except CorpusError as error:
        raise CorpusError(f"{place}: {error}") from None
    return tokenizer.encode_learnt(text, spans, begins=False)  # the template writes what begins it


def _messages_of(row: Any, place: str) -> list[dict[str, str]]:
    """The row as messages.

    Raises:
        CorpusError: Naming the place, what is wrong, and what is expected.
    """
    if not isinstance(row, dict):
        raise CorpusError(f"{place} is {str(row)[:60]!r}; write {EXPECTED}")
    if "messages" in row:
        if "prompt" in row or "response" in row:
            raise CorpusError(f"{place} has messages and a prompt or response; leave one of them")
        return _checked_messages(row["messages"], place)
    for key in ("prompt", "response"):
        if key not in row:
            has = f"the keys {', '.join(map(str, row))}" if row else "no keys"
            raise CorpusError(f"{place} has no {key!r}, but {has}; write {EXPECTED}")
        if not isinstance(row[key], str):
            raise CorpusError(f"{place} has {key} = {str(row[key])[:60]!r}; it must be a text")
    return [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["response"]},
    ]


def _checked_messages(messages: Any, place: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise CorpusError(f"{place} has messages = {str(messages)[:60]!r}; write {EXPECTED}")
    for number, message in enumerate(messages, 1):
        where = f"{place}, message {number}"
        if not isinstance(message, dict):
            raise CorpusError(f"{where} is {str(message)[:60]!r}; write {EXPECTED}")
        if message.get("role") not in ROLES:
            raise CorpusError(
                f"{where} has role = {message.get('role')!r}; it must be one of {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise CorpusError(
                f"{where} has content = {str(message.get('content'))[:60]!r}; it must be a text"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise CorpusError(
            f"{place} has nothing to learn from: no message is the assistant's; leave the row out"
        )
    return messages
