"""Text and instructions for a model that comes as a Hugging Face folder, as the folder's own
tokenizer cuts them.

    files of text          --> tokens, an end behind each file --> rows of T tokens
    .jsonl of instructions --> chat template --> a row each, which learns what the assistant says
                                                          |
                                          TokenRows, mapped from a cache
                                                          v
    RowBatches(rows, which, ...).next() --> {"input_ids": [rows, T], "labels": [rows, T]}

| file | what it does |
|---|---|
| folder_tokenizer.py | FolderTokenizer: tokenizer.json, special tokens, chat template |
| chat_template.py | ChatTemplate: messages as text, and which of it the assistant says |
| instructions.py | lines of JSON become tokens, and which of them are learnt |
| token_rows.py | TokenRows: rows of tokens on disk; `prepare_rows` writes them |
| row_batches.py | RowBatches: this rank's rows of each step |
"""

from pyops.data.folder_text.chat_template import ChatTemplate
from pyops.data.folder_text.folder_tokenizer import FolderTokenizer
from pyops.data.folder_text.row_batches import RowBatches, RowShare, held_out_batches
from pyops.data.folder_text.token_rows import RowOptions, TokenRows, prepare_rows

__all__ = [
    "ChatTemplate",
    "FolderTokenizer",
    "RowBatches",
    "RowOptions",
    "RowShare",
    "TokenRows",
    "held_out_batches",
    "prepare_rows",
]
