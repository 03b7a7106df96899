"""CoAtNet.folded: the logits of the model in eval mode, and what can't be folded."""

from __future__ import annotations

import pytest
import torch

from pyops.models import CoAtNet
from pyops.models.coatnet.batch_norm import GroupBatchNorm2d
from tests.models.coatnet.tiny import images_of, make

FORMS = (
    {},
    {"stride_in": "expand", "pool": "max"},
    {"stride_in": "pool", "activation": "silu"},
    {"stride_in": "pool", "pool": "max"},
    {"pre_norm_act": True, "se_early": True},
)


def trained(**form) -> CoAtNet:
    """With statistics that no batch norm begins with, and scales of both signs."""
    torch.manual_seed(3)
    model = make(**form)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, GroupBatchNorm2d):
                module.weight.normal_()
                module.bias.normal_()
    model(images_of()[0])
    return model


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_logits_are_those_of_eval_mode(form: dict):
    model = trained(**form)
    images, _ = images_of(1)
    folded = model.folded()
    assert model.training
    with torch.no_grad():
        expected = model.eval()(images)
        torch.testing.assert_close(folded(images), expected, rtol=1e-11, atol=1e-11)
        assert expected.std() > 1e-3
    kept = sum(isinstance(m, torch.nn.Parameter) for m in folded.parameters() if m.requires_grad)
    assert kept == 0


def test_what_can_not_be_folded():
    with pytest.raises(ValueError, match='norm is "layer"'):
        make(norm="layer").folded()
