"""A Hugging Face folder that `pyops compress` can make smaller: a GPT over bytes, trained here on
the sources of the Python standard library.

    python examples/compress/make_folder.py        some minutes on two cores: runs/compress/gpt
    pyops compress examples/compress/compress.toml

Beside the folder lie train.txt, which it was trained on, and held_out.txt.
"""

import json
import sys
from pathlib import Path

import tokenizers
import torch

from pyops import hub
from pyops.data import DataConfig
from pyops.data.corpus import find_documents, read_documents
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.optim.lr_scheduler import cosine_ratio

END = "</s>"  # of a text; the other 256 tokens are the bytes
SIZES = GPTConfig(
    vocab_size=257, sequence_length=128, num_layers=6, num_heads=4, dim=128, activation="gelu_tanh"
)


def byte_tokenizer():
    """Each byte is a token."""
    level = tokenizers.pre_tokenizers.ByteLevel
    words = {word: number for number, word in enumerate([END, *sorted(level.alphabet())])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = level(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END])
    return made


def make_folder(folder, train, held_out, config=SIZES, *, num_steps=600, batch=16, lr=3e-3):
    """The folder, and the two texts beside it; returns the loss of the last batch."""
    model, tokenizer = GPT(config, seed=0), byte_tokenizer()
    tokens, length = torch.tensor(tokenizer.encode(train).ids), config.sequence_length
    optimizer, draws = AdamW(model.parameters(), lr=lr), torch.Generator().manual_seed(0)
    for step in range(num_steps):
        ratio = cosine_ratio(step, steps=num_steps, final=0.05)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20) * ratio
        starts = torch.randint(len(tokens) - length, (batch,), generator=draws).tolist()
        rows = torch.stack([tokens[i : i + length + 1] for i in starts])
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
    hub.save(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder.parent / "train.txt").write_text(train)
    (folder.parent / "held_out.txt").write_text(held_out)
    return loss.item()


def sources(most=2_000_000):
    """Sources of the standard library, in an order that a hash of their names gives."""
    pieces = read_documents(find_documents(DataConfig()), max_bytes=most)
    return b"".join(pieces).decode(errors="replace")


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/compress/gpt")
    text = sources()
    make_folder(place, text[:-100_000], text[-100_000:])
    print(f"{place}; pyops compress examples/compress/compress.toml makes it smaller")
