"""`pyops generate` and `pyops eval` print what transformers would, and refuse in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pyops.cli import main
from tests.grids import full
from tests.parallel.tiny_folder import CHAT, make_folder, write_chat
from tests.parallel.tiny_transformers import transformers
from tests.project.documents import differs

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = make_folder(tmp_path_factory.mktemp("cli") / "llama", chat=CHAT)
    (found.parent / "t.txt").write_text("to be or not to be, that is the question.\n" * 3)
    return found


def test_generate_continues_as_transformers_does(folder, capsys):
    options = ["--max-new-tokens", "12", "--device", "cpu"]
    assert main(["generate", str(folder), "--prompt", "to be", *options]) == 0
    shown = capsys.readouterr().out
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)

    def continued(ids: torch.Tensor) -> torch.Tensor:
        return model.generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=[1, 1], pad_token_id=2
        )[0]

    ids = tokenizer("to be", return_tensors="pt", padding=False, truncation=False)["input_ids"]
    assert ids.tolist()[0][0] == 0, "<s> begins the prompt"
    found = continued(ids)
    text = tokenizer.decode(found, skip_special_tokens=True).replace(" ", "")
    assert shown.replace(" ", "").strip() == text.strip()
    assert len(found) > 6
    assert main(["generate", str(folder), "--prompt", "to be", "--chat", *options]) == 0
    answer = capsys.readouterr().out
    ids = torch.tensor([[0, 3, *ids[0, 1:].tolist(), 4]])  # <s><user>to be<bot>
    told = tokenizer.decode(continued(ids)[ids.shape[1] :], skip_special_tokens=True)
    assert answer.replace(" ", "").strip() == told.replace(" ", "").strip()


def test_generate_draws_by_seed(folder, capsys):
    words = ["generate", str(folder), "--prompt", "to", "--temperature", "2", "--top-k", "9"]
    shown = []
    for seed in ("1", "1", "2"):
        assert main([*words, "--seed", seed, "--max-new-tokens", "20", "--device", "cpu"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    words += ["--seed", "1", "--max-new-tokens", "20", "--device", "cpu"]
    assert main([*words, "--top-p", "1e-9"]) == 0
    assert capsys.readouterr().out != shown[0]
    assert main([*words, "--top-p", "1.5"]) == 2
    assert "top_p is 1.5; give a probability" in capsys.readouterr().err


def eval_words(folder: Path, data: str, *more: str) -> list[str]:
    place = ["--data", str(folder.parent / data), "--cache", str(folder.parent / "cache")]
    return ["eval", str(folder), *place, "--device", "cpu", *more]


def test_eval_prints_the_loss_of_transformers(folder, capsys):
    assert main(eval_words(folder, "t.txt", "--sequence-length", "50", "--batch", "2")) == 0
    shown = capsys.readouterr().out
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = (folder.parent / "t.txt").read_text()
    ids = tokenizer(text, return_tensors="pt", padding=False, truncation=False)["input_ids"][0]
    ids = torch.cat([ids, torch.tensor([1])])
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    nats, count = 0.0, 0
    for row in ids.split(50):
        with torch.no_grad():
            nats += float(model(row[None], labels=row[None]).loss) * (len(row) - 1)
        count += len(row) - 1
    loss, perplexity = nats / count, math.exp(nats / count)
    stated = (
        f"loss {loss:.4f} nats per token, perplexity {perplexity:.4f}: {count:,} tokens in 3 rows"
    )
    assert not differs(shown.partition(" of ")[0], stated), shown


def use_on_rank(rank: int, group: object, folder: Path, words: list[str]) -> str:
    import argparse

    from pyops.cli.folder_commands import add_eval, add_generate, answer, score

    parser = argparse.ArgumentParser()
    generates = words[0] == "generate"
    (add_generate if generates else add_eval)(parser)
    given = parser.parse_args(words[1:])
    try:
        return (answer if generates else score)(given)
    except ValueError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("layout", ["--tp", full("--pp")])
def test_two_ranks_say_what_one_does(folder, world, layout):
    write_chat(folder.parent / "c.jsonl", rows=7)
    for words in (
        ["generate", str(folder), "--prompt", "so", "--max-new-tokens", "9", "--device", "cpu"],
        eval_words(folder, "c.jsonl", "--batch", "3"),
    ):
        alone = use_on_rank(0, None, folder, words)
        assert not alone.startswith("refused")
        for said in world(2).run(use_on_rank, folder, [*words, layout, "2"]):
            assert not differs(said, alone), (said, alone)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", ""], "the prompt of 1 tokens|has no tokens"),
        (["--prompt", "a", "--temperature", "-1"], "generate: temperature is -1.0; give 0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens is 0; give a whole number"),
        (["--prompt", "a", "--max-new-tokens", "2047"], "2047 are 2049 tokens, but the model of"),
        (["--prompt", "a", "--tp", "2"], "the plan is for tp 2 x pp 1 = 2 ranks or a multiple"),
    ],
)
def test_generate_refuses_in_one_line(folder, capsys, words, said):
    import re

    code = main(["generate", str(folder), "--device", "cpu", *words])
    shown = capsys.readouterr()
    if words[1]:
        assert code == 2
        assert re.search(said, shown.err)
        assert len(shown.err.splitlines()) == 1


def test_eval_refuses_in_one_line(folder, capsys):
    (folder.parent / "bad.jsonl").write_text("{\n")
    assert main(eval_words(folder, "bad.jsonl")) == 2
    assert "bad.jsonl:1 is no JSON" in capsys.readouterr().err
    assert main(eval_words(folder, "none.txt")) == 2
    assert "none.txt does not exist" in capsys.readouterr().err
    assert main(eval_words(folder, "t.txt", "--batch", "0")) == 2
    assert "batch is 0" in capsys.readouterr().err
