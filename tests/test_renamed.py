"""An old public name is answered by the new one, which exists."""

from __future__ import annotations

import importlib
import re

import pytest

import pyops
from pyops.renamed import ATTRIBUTES, MODULES, refuse_renamed

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("old", sorted(MODULES))
def test_an_import_of_an_old_name_says_the_new_one(old: str):
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(old)
    assert MODULES[old] in str(caught.value)


@pytest.mark.parametrize("old", sorted(MODULES))
def test_the_new_name_is_there(old: str):
    new = MODULES[old]
    if statement := re.search(r"`(from .*)`", new):
        exec(statement[1], {})
        return
    try:
        importlib.import_module(new)
    except ModuleNotFoundError:
        module, _, name = new.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", sorted(ATTRIBUTES))
def test_a_name_within_a_module_says_the_new_one(module: str):
    for old, new in ATTRIBUTES[module].items():
        assert hasattr(importlib.import_module(module), new)
        with pytest.raises(ImportError, match=f"new name: {new}"):
            exec(f"from {module} import {old}", {})


def test_an_attribute_of_the_package_that_has_moved():
    with pytest.raises(AttributeError, match=r"pyops\.optim\.lr_scheduler"):
        _ = pyops.schedules


def test_a_keyword_argument_of_an_old_name_says_the_new_one():
    refuse_renamed("step", {}, {"op": "reduction"})
    with pytest.raises(TypeError, match=r"^step: .* op .* reduction$"):
        refuse_renamed("step", {"op": "mean"}, {"op": "reduction"})
    with pytest.raises(TypeError, match=r"step\(\) got an unexpected keyword argument 'opp'"):
        refuse_renamed("step", {"opp": "mean"}, {"op": "reduction"})
