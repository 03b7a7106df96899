"""No odd tensor brings down a callable of pyops beside the ops, or gets a wrong answer out of it."""

from __future__ import annotations

import pytest

from tests.odd_input.runs import wrong_in

pytestmark = pytest.mark.cpu_only


@pytest.mark.slow
def test_every_odd_tensor_in_every_callable():
    assert wrong_in("tests.odd_input.callables", "all") == []
