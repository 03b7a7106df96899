"""Options by keyword: a signature that is torch's and more, and names that are refused."""

import inspect

import pytest
import torch

import pyops
from pyops.optim import LAMB, LARS, SGD, Adafactor, Adagrad, Adam, AdamW, Lion

pytestmark = pytest.mark.cpu_only

OPTIMIZERS = (Adam, AdamW, SGD, Adagrad, Adafactor, LAMB, LARS, Lion)
OURS = {"master_weights", "stochastic_rounding", "max_grad_norm", "zero_grad", "seed"}


@pytest.mark.parametrize("ours", OPTIMIZERS[:5], ids=lambda cls: cls.__name__)
def test_torchs_arguments_have_torchs_places_and_defaults(ours: type):
    theirs = inspect.signature(getattr(torch.optim, ours.__name__)).parameters
    mine = inspect.signature(ours).parameters
    assert set(mine) - set(theirs) == OURS | (
        {"capturable"} if ours is Adafactor else {"state_dtype"}
    )
    for name, parameter in theirs.items():
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default), name
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(mine)[: len(positional)] == positional


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_what_the_signature_shows_is_what_is_taken(kind: type):
    shown = inspect.signature(kind).parameters
    given = {name: p.default for name, p in shown.items() if name != "params"}
    full = kind([torch.ones(3, requires_grad=True)], **given)
    bare = kind([torch.ones(3, requires_grad=True)])
    assert full.defaults == bare.defaults
    assert list(full.defaults) == list(bare.defaults)
    assert [getattr(full, name) == getattr(bare, name) for name in ("state_dtype", "max_grad_norm")]


@pytest.mark.parametrize(
    ("kind", "wrong", "near"),
    [
        (AdamW, "master_weight", "master_weights"),
        (AdamW, "beta", "betas"),
        (SGD, "momentun", "momentum"),
        (LAMB, "trust", "trust_ratio"),
        (Adafactor, "max_norm", "max_grad_norm"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest(kind: type, wrong: str, near: str):
    with pytest.raises(TypeError) as refused:
        kind([torch.ones(3, requires_grad=True)], **{wrong: 1})
    for part in (kind.__name__, repr(wrong), repr(near)):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "option"),
    [(AdamW, "decoupled_weight_decay"), (Adafactor, "state_dtype"), (SGD, "capturable")],
)
def test_an_option_of_another_optimizer_is_refused(kind: type, option: str):
    with pytest.raises(TypeError, match=option):
        kind([torch.ones(3, requires_grad=True)], **{option: True})


def test_an_unlike_name_gets_the_list():
    with pytest.raises(TypeError, match="weight_decay"):
        pyops.optim.Lion([torch.ones(3, requires_grad=True)], xyzzy=1)
