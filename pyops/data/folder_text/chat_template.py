"""ChatTemplate: messages as the text that a model of a chat was trained on, and which of it the
assistant says.

    user "1+1?", assistant "2"    ->    <user>1+1?<assistant>2<end>
                                                            ^^^^^^ learnt
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence

from pyops.data.corpus import CorpusError

__all__ = ["ChatTemplate", "Message", "Span"]

Message = Mapping[str, str]  # "role" and "content"
Span = tuple[int, int]  # characters from, and up to
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A template of Jinja, rendered as transformers does it.

    Args:
        source: The template.
        special_tokens: {"bos_token": "<s>", ...}, which it may use.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The messages as text.

        Args:
            messages: In their order.
            add_generation_prompt: Whether what the assistant's next message begins with follows.

        Raises:
            CorpusError: The template can't be used, or refuses these messages.
        """
        return self._rendered(messages, add_generation_prompt=add_generation_prompt)[0]

    def with_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The messages as text, and where in it is what the assistant says, with the mark that ends
        it: as {% generation %} of the template says, or else what a message of the assistant adds
        to the text of those before it.

        Args:
            messages: In their order.

        Raises:
            CorpusError: As of `render`; or the template has no {% generation %} and writes a
                message otherwise once others follow.
        """
        if MARKED.search(self.source):
            return self._rendered(messages, marked=True)
        whole = self.render(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], add_generation_prompt=True)
            after = self.render(messages[: number + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise CorpusError(
                    f"the chat template writes message {number + 1} otherwise once others follow, "
                    "so that it does not say which text is the assistant's; mark that in the "
                    "template with {% generation %} ... {% endgeneration %}, or give rows of one "
                    "answer each"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _rendered(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Span]]:
        try:
            rendering = importlib.import_module("transformers.utils.chat_template_utils")
        except ImportError as error:
            raise CorpusError(
                f"chat templates need transformers, which can't be imported ({error}); pip install "
                "transformers, or give rows of prompt and response and a folder without a template"
            ) from None
        try:
            texts, spans = rendering.render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=marked,
                **self.special_tokens,
            )
        except Exception as error:  # whatever a template does, and its own raise_exception
            raise CorpusError(
                f"the chat template can't write these messages ({type(error).__name__}: {error}); "
                "correct them, or the folder's template"
            ) from None
        return str(texts[0]), [(start, end) for start, end in spans[0]] if marked else []
