"""A plan with cp shares out the tokens of rows of anybody's model; losses stay those of one
process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks, Order
from pyops.mesh import ALONE
from pyops.models.context import TokenContext
from pyops.optim import AdamW
from pyops.parallel import PairLoss, ParallelPlan, PipelineOptions, composition, parallelize
from pyops.parallel.losses import LabelLoss
from pyops.parallel.rows.rows_trial import find_rows_plan, share_tokens
from pyops.parallel.rows.shared_tokens import SharedTokens
from pyops.zero import ZeroConfig
from tests.grids import full
from tests.parallel.test_trainer import (
    DROPOUT,
    LR,
    alone,
    close,
    own_rows,
    rows_for,
    train,
    train_on_rank,
)
from tests.parallel.tiny_transformers import batch_for, make_model

pytestmark = pytest.mark.cpu_only

METHODS, ORDERS = ("gather", "ulysses", "ring"), ("zigzag", "contiguous", "striped")
STEPS = 5
ZERO_3 = ZeroConfig(stage=3)
SP = {"tp": 2, "sequence_parallel": True}
STAGES = {"pp": 2, "pipeline": PipelineOptions(num_microbatches=4)}
FULL = [
    *[
        ("llama", cp, {"cp": cp, "cp_method": method, "cp_order": order})
        for cp in (2, 4)
        for method in METHODS
        for order in ORDERS
    ],
    *[
        ("llama", 4, {"cp": 2, "cp_method": method, **more})
        for method in METHODS
        for more in ({"tp": 2}, SP, STAGES, {"zero": ZERO_3}, {"zero": ZeroConfig(stage=1)})
    ],
    *[(name, 2, {"cp": 2, "cp_method": "ring"}) for name in ("qwen3", "llama tied", "bert")],
    ("gpt2", 4, {"cp": 4, "cp_method": "ulysses", "num_microbatches": 3}),
    ("gpt2", 4, {"cp": 2, "cp_method": "gather", **STAGES}),
    ("bert", 4, {"cp": 2, "cp_method": "ulysses", **SP}),
    ("llama", 8, {"cp": 2, "cp_method": "ring", **SP, **STAGES, "zero": ZERO_3}),
    ("llama", 8, {"cp": 2, "cp_method": "ulysses", "tp": 2, "zero": ZERO_3}),
    ("llama", 2, {"cp": 2, "cp_method": "ring", "recompute": ("model.layers.*",)}),
]


@pytest.mark.parametrize(
    ("name", "ranks", "plan", "steps"),
    [
        ("llama", 2, {"cp": 2, "cp_method": "ring", "num_microbatches": 2}, STEPS),
        ("gpt2", 4, {"cp": 2, "cp_method": "ulysses", "cp_order": "striped", **STAGES}, STEPS),
        full("bert", 2, {"cp": 2, "cp_order": "contiguous"}, STEPS),
        *[full(*case, 20) for case in FULL],
    ],
)
def test_losses_do_not_depend_on_who_has_which_tokens(
    name: str, ranks: int, plan: dict[str, Any], steps: int, world: Any
) -> None:
    """Rows of 9 tokens, which no order divides: some are masked, others have no label."""
    found = world(ranks).run(train_on_rank, name, ParallelPlan(**plan), DROPOUT[name], steps)
    for losses in found:
        close(losses, alone(name, steps))


def compiled_on_rank(rank: int, group: object, backend: str, body: Any, *args: Any) -> Any:
    """A body whose blocks are compiled by this backend; how many frames were, too."""

    def compile_blocks(blocks: Any) -> None:
        for block in blocks:
            block.compile(backend=backend)

    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["frames"]["ok"]
    with mock.patch.object(composition, "compile_blocks", compile_blocks):
        found = body(rank, group, *args)
    return found, torch._dynamo.utils.counters["frames"]["ok"] - before


@pytest.mark.parametrize(
    ("name", "plan", "backend"),
    [
        full("llama", {"cp": 2, "cp_method": "ring"}, "aot_eager"),
        full("gpt2", {"cp": 2, "cp_method": "ulysses", "num_microbatches": 2}, "aot_eager"),
        full("bert", {"cp": 2, "cp_method": "gather"}, "aot_eager"),
        # One layer: a rank waits for the other's compiler no longer than for anything else.
        full("llama, one layer", {"cp": 2, "cp_method": "ring"}, "inductor"),
    ],
)
def test_blocks_are_compiled_around_the_exchange(
    name: str, plan: dict[str, Any], backend: str, world: Any
) -> None:
    chosen, (name, *short) = ParallelPlan(**plan, compile=True), name.split(", ")
    config = {**DROPOUT[name], **({"num_hidden_layers": 1} if short else {})}
    found = world(2).run(
        compiled_on_rank, backend, train_on_rank, name, chosen, config, 2, timeout=200.0
    )
    expected = train(name, ParallelPlan(), config, 2)
    for losses, frames in found:
        close(losses, expected)
        assert frames > 2, "nothing was compiled"


class Attention(nn.Module):
    """Causal, by torch's function."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        p = 0.2 if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return functional.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.2, self.training)


class Block(nn.Module):
    """Attention of its own, and a layer of torch's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim)
        self.layer = nn.TransformerEncoderLayer(dim, 2, 24, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=mask, is_causal=True)


class Net(nn.Module):
    """A model of nobody's library."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, dim), nn.Embedding(32, dim)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 20)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        x = self.drop(self.tokens(tokens) + self.places(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _nats(logits: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum", ignore_index=-100
    )


def _shifts_by_itself(logits: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="sum"
    )


COUNTED = PairLoss(_nats, lambda batch: float((batch["targets"] != -100).sum()), names=("targets",))


def _text(step: int, T: int = 8) -> dict[str, Tensor]:
    text = torch.randint(20, (4, T + 1), generator=torch.Generator().manual_seed(step))
    targets = text[:, 1:].clone()
    targets[:, :3] = -100
    return {"tokens": text[:, :-1], "targets": targets}


def _train_net(plan: ParallelPlan) -> tuple[list[float], float]:
    torch.manual_seed(0)
    trainer = parallelize(
        Net(),
        plan,
        optimizer=partial(AdamW, lr=LR),
        loss=COUNTED,
        seed=3,
        example_inputs={"tokens": _text(0)["tokens"]},
    )
    return [trainer.step(_text(step)) for step in range(4)], trainer.evaluate([_text(9)])


def _train_net_on_rank(rank: int, group: object, plan: ParallelPlan) -> Any:
    if plan.compile:
        found, frames = compiled_on_rank(rank, group, "eager", lambda *_: _train_net(plan))
        assert frames > 2, "nothing was compiled"
        return found
    return _train_net(plan)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"cp": 2, "cp_method": "ring"}),
        full(2, {"cp": 2, "cp_method": "ulysses", "recompute": ("blocks.*",)}),
        full(4, {"cp": 4, "cp_method": "gather", "cp_order": "striped", "zero": ZERO_3}),
        full(2, {"cp": 2, "compile": True}),  # ten seconds of a compiler
    ],
)
def test_a_model_of_nobodys_library(ranks: int, plan: dict[str, Any], world: Any) -> None:
    expected, evaluated = _train_net(ParallelPlan())
    for losses, mean in world(ranks).run(_train_net_on_rank, ParallelPlan(**plan)):
        close(losses, expected)
        assert mean == pytest.approx(evaluated, abs=1e-5)


def test_layers_of_torch_take_no_short_cut_without_gradients() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    batch = {"tokens": _text(0)["tokens"]}
    plan = find_rows_plan(net, [], ranks=2, method="ring", order="zigzag", example_inputs=batch)
    copies = [copy.deepcopy(net) for _ in range(2)]

    def body(transport: Any) -> Tensor:
        context = TokenContext(ContextRanks.of(transport, method="ring"), "zigzag")
        tokens, _ = share_tokens(copies[transport.rank], plan, context)
        with torch.no_grad():
            return copies[transport.rank](**tokens.own(batch))

    whole = Order.of("zigzag", length=8, ranks=2).unshard(run_virtual(2, body))
    with torch.no_grad():
        torch.testing.assert_close(whole, net(**batch))


class Convolution(Net):
    """Mixes neighbors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(16, 16, 3, padding=2)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        return self.head(self.mix(x.transpose(1, 2))[..., :-2].transpose(1, 2))


class OwnProducts(Net):
    """Attention by products of its own."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        return self.head((x @ x.mT).softmax(-1) @ x)


class OwnPlaces(Net):
    """Numbers its tokens by itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Pooled(Net):
    """One result for each row."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions).mean(1)


class OwnGradient(Net):
    """Multiplies its gradient by how many tokens it is given."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        y = super().forward(tokens, positions)
        return y + (y - y.detach()) * tokens.shape[1]


class WithWeights(Net):
    """Asks for the weights of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        return self.head(self.attention(x, x, x)[0])


class WithMask(WithWeights):
    """Makes a mask of pairs of tokens."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.attention(x, x, x, attn_mask=seen, need_weights=False)[0])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Convolution, "its outputs are not that of whole rows.*nothing else may mix tokens"),
        (OwnProducts, "its outputs are not that of whole rows"),
        (OwnPlaces, "takes neither position_ids nor positions, and may number its tokens"),
        (Pooled, r"it returns a tensor \[4, 20\], not one result for each of the 8 tokens"),
        (OwnGradient, "the gradient of tokens.weight is not that of whole rows"),
        (WithWeights, "asks for the weights of attention: call it with need_weights=False"),
        (WithMask, r"asks for a mask \[.*4, 4\] of this rank's own tokens: give is_causal"),
    ],
)
def test_what_ranks_would_not_see_is_refused(kind: Any, words: str) -> None:
    tokens = _text(0)["tokens"]
    given = {"tokens": tokens}
    if kind is not OwnPlaces:
        given["positions"] = torch.arange(8).expand(4, -1)
    with pytest.raises(
        ValueError, match=f"(?s)cp is 2, but the tokens of {kind.__name__}.*{words}"
    ):
        find_rows_plan(kind(), [], ranks=2, method="gather", order="zigzag", example_inputs=given)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bloom", "takes neither position_ids nor positions"),
        ("bert classifier", r"it returns a tensor \[2, 2\], not one result for each"),
        full("roberta", "its outputs are not that of whole rows"),
        full("vit", "channel"),
    ],
)
def test_models_of_transformers_that_ranks_cannot_share(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_rows_plan(make_model(name), [], ranks=2, method="gather", order="zigzag")


@pytest.mark.parametrize(
    ("name", "documents", "holes"),
    [
        ("mixtral", True, True),
        ("opt", False, False),
        *[
            full(name, True, True)
            for name in ("gemma2", "gemma3", "gpt-neox", "mistral", "phi", "phi3")
        ],
    ],
)
def test_models_of_transformers_that_ranks_share(name: str, documents: bool, holes: bool) -> None:
    plan = find_rows_plan(make_model(name), [], ranks=3, method="ring", order="striped")
    assert plan.registry
    assert (plan.documents, plan.holes) == (documents, holes)


def test_what_a_model_does_not_take_is_refused_by_batch() -> None:
    context = TokenContext(ContextRanks.of(ALONE), "zigzag")
    tokens = SharedTokens(
        context,
        ("input_ids", "attention_mask", "position_ids"),
        whole_mask=True,
        documents=False,
        holes=False,
    )
    ids = torch.arange(6).expand(2, -1)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    loss = LabelLoss(shifts=True)
    tokens.check({"input_ids": ids, "labels": ids, "attention_mask": mask}, loss)
    for more, words in (
        ({"attention_mask": mask.flip(1)}, "leaves out tokens before others"),
        ({"position_ids": ids % 3}, "this model does not keep documents apart"),
        ({"position_ids": ids % 3, "attention_mask": mask}, "leave the mask out"),
        ({"past_key_values": ids}, "the batch has 'past_key_values'"),
    ):
        with pytest.raises(ValueError, match=words):
            tokens.check({"input_ids": ids, "labels": ids, **more}, loss)


def _refused(rank: int, group: object) -> list[str]:
    """What all ranks are told of models and batches, with the model as it was."""
    found = []

    def told(call: Any) -> None:
        with pytest.raises(ValueError) as caught:
            call()
        found.append(str(caught.value))

    make = partial(parallelize, optimizer=partial(AdamW, lr=LR))
    plan, llama = ParallelPlan(cp=2), make_model("llama", attention_dropout=0.0)
    before = llama.config._attn_implementation
    told(lambda: make(make_model("t5"), plan))
    told(lambda: make(make_model("bloom"), plan))
    told(lambda: make(llama, ParallelPlan(cp=2, cp_method="ulysses", recompute=("nothing",))))
    assert llama.config._attn_implementation == before
    assert not llama._forward_pre_hooks
    trainer = make(llama, plan)
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
    told(lambda: trainer.step({"input_ids": ids + rank, "labels": ids}))
    told(lambda: trainer.step({"input_ids": ids, "labels": ids[:, 0]}))
    mask = torch.ones(2, 1, 8, 8)
    told(lambda: trainer.step({"input_ids": ids, "labels": ids, "attention_mask": mask}))
    net = make(
        Net(),
        plan,
        loss=(_shifts_by_itself, lambda batch: 28.0),
        example_inputs={"tokens": ids % 20},
    )
    told(lambda: net.step({"tokens": ids % 20}))
    told(lambda: net.step({"tokens": ids[:, :7] % 20}))
    assert trainer.step({"input_ids": ids, "labels": ids}) > 1.0
    return found


def test_refusals_reach_all_ranks_and_change_nothing(world: Any) -> None:
    words = [
        "cp is 2, but T5ForConditionalGeneration has an encoder and a decoder",
        "cp is 2, but the tokens of BloomForCausalLM can't be shared out",
        "recompute: ",
        "ranks 0 and 1 share out the tokens of the same rows (cp), and were given other ones",
        "labels are [2], and ranks of context parallelism share out rows of 8 tokens",
        "attention_mask is [2, 1, 8, 8]; with context parallelism give that of whole rows",
        "it is no sum over tokens",
        "7 tokens can't be shared out zigzag over 2 ranks: pad the row to 8",
    ]
    for found in world(2).run(_refused):
        assert len(found) == len(words)
        for text, word in zip(found, words, strict=True):
            assert word in text


def _packed(step: int) -> dict[str, Tensor]:
    """Two documents in each row, told by positions."""
    ids = batch_for("llama", rows=2, seed=step)["input_ids"]
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]).expand(2, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": places}


def _ends(plan: ParallelPlan, folder: Any = None) -> Any:
    """Losses of packed rows, an evaluation of rows of other lengths, text, and what is written."""
    model = make_model("llama", attention_dropout=0.0, attn_implementation="sdpa")
    trainer = parallelize(model, plan, optimizer=partial(AdamW, lr=LR), seed=7)
    losses = [trainer.step(_packed(step)) for step in range(3)]
    short = {key: value[:, :3] for key, value in rows_for("llama", 52).items()}
    mean = trainer.evaluate([own_rows(rows_for("llama", 50), 0, 1), _packed(51), short])
    text = trainer.generate(_packed(1)["input_ids"][:, :5], max_new_tokens=4)
    if folder is not None:
        trainer.save_pretrained(folder / "model")
        trainer.save(folder / "checkpoint")
    return losses, mean, text


def _ends_on_rank(rank: int, group: object, plan: ParallelPlan, folder: Any) -> Any:
    return _ends(plan, folder)


def test_documents_evaluation_text_and_folders(world: Any, tmp_path: Any) -> None:
    import transformers

    expected, evaluated, text = _ends(ParallelPlan())
    plan = ParallelPlan(cp=2, cp_method="ring", zero=ZeroConfig(stage=1))
    for losses, mean, said in world(2).run(_ends_on_rank, plan, tmp_path):
        close(losses, expected)
        assert mean == pytest.approx(evaluated, abs=1e-5)
        assert torch.equal(said, text)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = parallelize(make_model("llama"), optimizer=partial(AdamW, lr=LR))
    trainer.load(tmp_path / "checkpoint")
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, again.get_parameter(name)), name
    assert trainer.num_steps == 3
