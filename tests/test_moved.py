"""Parameters that were moved, cast or replaced after a strategy took them: an error on all ranks,
never a constant loss."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.comm import all_reduce
from pyops.comm.collectives.communicator import departures
from pyops.comm.failure import CommunicationError
from pyops.data_parallel import DataParallel
from pyops.flat import FlatBuffer
from pyops.mesh import ALONE
from pyops.onebit import OneBitAdam, OneBitConfig
from pyops.optim import SGD, AdamW
from pyops.pipeline import Pipeline, schedule
from pyops.zero import ZeroConfig, ZeroOptimizer

pytestmark = pytest.mark.cpu_only


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def _replace(model: nn.Module) -> None:
    last = list(model.children())[-1]
    last.weight = nn.Parameter(torch.full((2, 6), 0.1))


def _other_memory(model: nn.Module) -> None:
    last = list(model.children())[-1]
    last.bias.data = torch.ones(2)


def _assign(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "to a dtype": lambda model: model.to(torch.bfloat16),
    "memory": _other_memory,
    "assign": _assign,
    "replaced": _replace,
    "there and back": lambda model: model.double().float(),
}
HARMLESS: dict[str, Callable[[nn.Module], Any]] = {
    "to the same": lambda model: model.to("cpu", torch.float32),
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "loaded": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "parametrized": lambda model: torch.nn.utils.parametrize.register_parametrization(
        model[0], "weight", nn.Identity()
    ),
    "frozen": lambda model: model[0].requires_grad_(False),
    "evaluated": lambda model: model.eval(),
}


def x_of(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 6, generator=generator).to(next(model.parameters()).dtype)


class Trained:
    """A network and one step of it, by a strategy."""

    def __init__(self, strategy: str, group: dist.ProcessGroup | None = None) -> None:
        self.model, self.strategy = network(), strategy
        if strategy == "DataParallel":
            self.forward: nn.Module = DataParallel(self.model, group=group)
            self.optimizer: Any = AdamW([buffer.parameter for buffer in self.forward.flat], lr=0.01)
        elif strategy == "Pipeline":
            plan = schedule("1f1b", num_stages=1, num_microbatches=2)
            self.forward = Pipeline(
                list(self.model),
                schedule=plan,
                group=ALONE,
                loss=lambda y, t: (y - t).square().mean(),
            )
            self.optimizer = SGD(self.forward.parameters(), lr=0.01)
        else:
            self.forward = self.model
            self.optimizer = ZeroOptimizer(
                self.model, AdamW, ZeroConfig(stage=int(strategy[-1])), group=group, lr=0.01
            )

    def step(self, between: Callable[[nn.Module], Any] | None = None) -> float:
        """between: what is done between backward and step."""
        x = x_of(self.model)
        if self.strategy == "Pipeline":
            loss = self.forward.step(x, torch.zeros(4, 2))
        else:
            loss = self.forward(x).float().square().mean()
            loss.backward()
        if between is not None:
            between(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


NAMES = {"D": "DataParallel", "Z": "ZeroOptimizer", "P": "Pipeline"}
FLAT = ("DataParallel", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3")
REPLACED = ("assign", "replaced")


@pytest.mark.parametrize("strategy", [*FLAT, "Pipeline"])
def test_a_moved_parameter_is_found_before_it_computes(strategy):
    for name, move in MOVES.items():
        if strategy == "Pipeline" and name not in REPLACED:
            continue  # a pipeline refers to parameters, wherever their memory is
        trained = Trained(strategy)
        first, second = trained.step(), trained.step()
        assert second < first
        move(trained.model)
        before = [p.detach().clone() for p in trained.model.parameters()]
        with pytest.raises(
            ValueError,
            match=rf"^{NAMES[strategy[0]]}: .*(is another Parameter now|was given other)",
        ) as caught:
            trained.step()
        assert "afterwards" in str(caught.value)
        for p, q in zip(trained.model.parameters(), before, strict=True):
            assert torch.equal(p.detach(), q), "nothing is changed"


@pytest.mark.parametrize("strategy", FLAT)
def test_a_parameter_moved_between_backward_and_step_is_found(strategy):
    moves = {
        name: move
        for name, move in MOVES.items()
        if strategy != "DataParallel" or name not in REPLACED
    }
    for move in moves.values():
        trained = Trained(strategy)
        trained.step()
        refused = r"was given other memory|is another Parameter|gradient of .* spread"
        with pytest.raises((ValueError, RuntimeError), match=refused):
            trained.step(move)  # what casts the gradients as well is refused by those of ZeRO


@pytest.mark.parametrize("strategy", [*FLAT, "Pipeline"])
def test_what_moves_nothing_is_harmless(strategy):
    for name, call in HARMLESS.items():
        if strategy == "Pipeline" and name == "parametrized":
            continue  # the optimizer of the test has the names of before
        plain, trained = Trained(strategy), Trained(strategy)
        plain.step(), trained.step()
        call(trained.model)
        if name == "frozen":
            call(plain.model)
        assert trained.step() == plain.step()
        assert trained.step() == plain.step(), name


def test_forward_without_gradients_is_left_alone():
    trained = Trained("DataParallel")
    trained.model.half()
    with torch.no_grad():
        assert trained.forward(x_of(trained.model)).dtype == torch.float16


def _moved(
    rank: int,
    group: dist.ProcessGroup,
    strategy: str,
    name: str,
    who: tuple[int, ...],
    between: bool,
) -> tuple[str, str]:
    """What a rank raises where the ranks `who` move their parameters; and what comes of a
    collective afterwards."""
    group = dist.new_group(list(range(dist.get_world_size())))  # which is of no use afterwards
    trained = Trained(strategy, group)
    first, second = trained.step(), trained.step()
    assert second < first
    move = MOVES[name] if rank in who else (lambda model: None)
    raised = ""
    try:
        if not between:
            move(trained.model)
        trained.step(move if between else None)
    except (ValueError, CommunicationError) as error:
        raised = f"{type(error).__name__}: {error}"
    try:
        after = str(float(all_reduce(torch.ones(1), group=group)))
    except CommunicationError as error:
        after = type(error).__name__
    return raised, after


@pytest.mark.parametrize("name", ["half", "assign"])
@pytest.mark.parametrize("strategy", ["DataParallel", "ZeRO 1", "ZeRO 2"])
def test_all_ranks_hear_of_it_though_only_one_moved(world, strategy, name):
    mine, other = world(2).run(_moved, strategy, name, (0,), False)
    assert mine[0].startswith(f"ValueError: {NAMES[strategy[0]]}: ")
    assert other[0].startswith("CommunicationError: ")
    assert "rank 0 left: ValueError: " in other[0], other[0]
    assert "afterwards" in other[0], "the fix"
    assert (mine[1], other[1]) == ("CommunicationError", "CommunicationError"), (
        "nobody goes on without rank 0"
    )


@pytest.mark.parametrize("strategy", ["ZeRO 1", "ZeRO 3"])
def test_all_ranks_hear_of_a_move_between_backward_and_step(world, strategy):
    other, mine = world(2).run(_moved, strategy, "replaced", (1,), True)
    assert mine[0].startswith("ValueError: ZeroOptimizer: ")
    assert "rank 1 left: ValueError: " in other[0], other[0]


def test_all_ranks_hear_of_a_replaced_parameter_at_stage_3(world):
    other, mine = world(2).run(_moved, "ZeRO 3", "replaced", (1,), False)
    assert mine[0].startswith("ValueError: ZeroOptimizer: ")
    assert "rank 1 left: ValueError: " in other[0], other[0]


def test_where_all_ranks_moved_the_group_is_as_good_as_before(world):
    for raised, after in world(2).run(_moved, "DataParallel", "half", (0, 1), False):
        assert raised.startswith("ValueError: DataParallel: ")
        assert after == "2.0"


class _LateStore:
    """A store as TCPStore: what is set gets there with the next question, here `delay` seconds
    later."""

    def __init__(self, store: dist.Store, delay: float) -> None:
        self.store, self.delay, self.pending = store, delay, {}

    def set(self, key: str, value: str) -> None:
        self.pending[key] = value

    def check(self, keys: list[str]) -> bool:
        if self.pending:
            time.sleep(self.delay)
        for key, value in self.pending.items():
            self.store.set(key, value)
        self.pending = {}
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        return self.store.get(key)


def _moved_with_a_late_store(rank: int, group: dist.ProcessGroup) -> tuple[str, str]:
    inner, stores = departures.group_store, {}
    delay = 0.0 if rank else 0.5
    departures.group_store = lambda g: stores.setdefault(id(g), _LateStore(inner(g), delay))
    try:
        return _moved(rank, group, "DataParallel", "half", (0, 1), False)
    finally:
        departures.group_store = inner


def test_the_note_of_a_rank_that_leaves_is_there_before_the_others_look(world):
    for raised, after in world(2).run(_moved_with_a_late_store, timeout=15.0):
        assert raised.startswith("ValueError: DataParallel: ")
        assert after == "2.0"


def _replaced_stage(rank: int, group: dist.ProcessGroup) -> str:
    plan = schedule("1f1b", num_stages=2, num_microbatches=2)
    pipeline = Pipeline(
        list(network()), schedule=plan, group=group, loss=lambda y, t: (y - t).square().mean()
    )
    pipeline.step(torch.ones(4, 6), torch.zeros(4, 2))
    if rank:
        _replace(pipeline)
    with pytest.raises(ValueError) as caught:
        pipeline.step(torch.ones(4, 6), torch.zeros(4, 2))
    pipeline.close()
    return str(caught.value)


def test_all_ranks_of_a_pipeline_hear_of_a_replaced_parameter(world):
    for told in world(2).run(_replaced_stage):
        assert "4.weight is another Parameter now" in told


# -------------------------------------------------------------------------------------------------
# a second owner


def wrap(strategy: str, model: nn.Module) -> Any:
    if strategy == "DataParallel":
        return DataParallel(model)
    return ZeroOptimizer(model, AdamW, ZeroConfig(stage=int(strategy[-1])), lr=0.01)


@pytest.mark.parametrize("second", ["DataParallel", "ZeRO 1", "ZeRO 3"])
@pytest.mark.parametrize("first", ["DataParallel", "ZeRO 1", "ZeRO 3"])
def test_a_second_owner_is_refused_and_the_first_stays_usable(first, second):
    plain, trained = Trained(first), Trained(first)
    owner = NAMES[first[0]]
    with pytest.raises(ValueError, match=rf"0.weight belongs to a {owner}.*close\(\)"):
        wrap(second, trained.model)
    assert [trained.step() for _ in range(3)] == [plain.step() for _ in range(3)]
    (trained.forward if first == "DataParallel" else trained.optimizer).close()
    made = wrap(second, trained.model)
    with pytest.raises(ValueError, match="belongs to a"):
        wrap(first, trained.model)
    made.close()


def test_two_optimizers_of_different_parameters_of_a_model_are_two_owners_of_nothing_together():
    model = network()
    first = ZeroOptimizer(
        model, AdamW, ZeroConfig(stage=1), params=list(model[0].parameters()), lr=0.01
    )
    second = ZeroOptimizer(
        model, AdamW, ZeroConfig(stage=1), params=list(model[4].parameters()), lr=0.01
    )
    model(x_of(model)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    first.step(), second.step()
    assert [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)] == [
        False
    ] * 2 + [True] * 2 + [False] * 2


def test_a_copy_of_a_wrapped_model_is_free():
    model = network()
    wrapper = DataParallel(model)
    DataParallel(copy.deepcopy(model)).close()
    DataParallel(pickle.loads(pickle.dumps(model))).close()
    wrapper.close()
    wrapper.close()
    model.half()
    assert not hasattr(model[0].weight, "flat_watch")


def test_a_closed_wrapper_keeps_no_memory_and_says_what_to_call():
    wrapper = DataParallel(network())
    flat = weakref.ref(wrapper.flat[0].data)
    wrapper.close()
    gc.collect()
    assert flat() is None
    with pytest.raises(RuntimeError, match=r"closed.*\.module"):
        wrapper(x_of(wrapper.module))
    with torch.no_grad():
        assert torch.equal(wrapper(x_of(wrapper.module)), wrapper.module(x_of(wrapper.module)))


@pytest.mark.parametrize("strategy", ["DataParallel", "ZeRO 1", "ZeRO 3"])
def test_another_module_in_the_place_of_one_is_noticed_and_one_around_it_is_not(strategy):
    trained = Trained(strategy)
    plain = Trained(strategy)
    trained.model[2] = nn.Sequential(trained.model[2])  # keeps its parameters
    assert [trained.step() for _ in range(2)] == [plain.step() for _ in range(2)]
    old, trained.model[4] = trained.model[4], nn.Linear(6, 2)
    with pytest.raises(
        ValueError, match=r"4.weight is in the model no more.*another module in its place"
    ):
        trained.step()
    trained.model[4] = old
    trained.step()


# -------------------------------------------------------------------------------------------------
# flat optimizers


@pytest.mark.parametrize("kind", [AdamW, SGD, OneBitAdam])
def test_an_optimizer_over_a_flat_buffer_notices(kind):
    model = network()
    buffer = FlatBuffer(model.named_parameters())
    options = {"config": OneBitConfig(warmup_steps=5)} if kind is OneBitAdam else {}
    optimizer = kind([buffer.parameter], lr=0.01, **options)
    again = copy.deepcopy(optimizer) if kind is not OneBitAdam else None
    model(x_of(model)).square().mean().backward()
    optimizer.step()
    before = buffer.data.clone()
    model.half()
    with pytest.raises(
        ValueError, match=r"FlatBuffer: 4.bias was given other memory.* torch.float16 on cpu now"
    ):
        optimizer.step()
    assert torch.equal(buffer.data, before)
    if again is not None:
        again.step()  # of a parameter of its own
    assert pickle.loads(pickle.dumps(buffer.parameter)).shape == buffer.parameter.shape


def test_an_ordinary_optimizer_follows_its_parameters():
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    model.bfloat16()
    model(x_of(model)).float().square().mean().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


# -------------------------------------------------------------------------------------------------
# compiled


def _compiled_step(
    optimizer_of: Callable[..., Any], move: Callable[[nn.Module], Any], group: Any = None
) -> None:
    """Two compiled steps, and a third after a move; whose forward, compiled, does not look where
    parameters are."""
    model = network()
    wrapper = DataParallel(model, group=group)
    optimizer = optimizer_of([buffer.parameter for buffer in wrapper.flat], lr=0.01)
    compiled = torch.compile(wrapper, backend="eager")
    losses = []
    for turn in range(3):
        if turn == 2:
            move(model)
            before = wrapper.flat[0].data.clone()
        loss = compiled(x_of(model)).float().square().mean()
        losses.append(float(loss.detach()))
        try:
            loss.backward()
            optimizer.step()
        except (ValueError, CommunicationError):
            assert turn == 2
            assert losses[1] < losses[0]
            assert torch.equal(wrapper.flat[0].data, before), "nothing is changed"
            raise
        optimizer.zero_grad()


@pytest.mark.real_device
@pytest.mark.parametrize("optimizer_of", [AdamW, torch.optim.AdamW])
def test_a_compiled_wrapper_looks_in_backward_or_at_the_step(optimizer_of):
    for name in (
        "memory",
        "there and back",
        "replaced",
        "assign",
    ):  # tracing itself fails for another dtype
        if name == "assign" and optimizer_of is torch.optim.AdamW:
            continue  # no gradient arrives at any parameter, and torch's optimizer asks nobody
        with pytest.raises(
            ValueError, match=r"^DataParallel: .*(is another Parameter now|was given other)"
        ):
            _compiled_step(optimizer_of, MOVES[name])
    for call in HARMLESS.values():
        if call is not HARMLESS["parametrized"]:
            _compiled_step(optimizer_of, call)


def _compiled_rank(rank: int, group: dist.ProcessGroup) -> str:
    group = dist.new_group(list(range(dist.get_world_size())))  # which is of no use afterwards
    try:
        _compiled_step(
            torch.optim.AdamW, MOVES["memory"] if rank == 1 else lambda model: None, group
        )
    except (ValueError, CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.full
@pytest.mark.real_device
def test_all_ranks_hear_of_a_move_under_a_compiled_wrapper(world):
    other, mine = world(2).run(_compiled_rank)
    assert mine.startswith("ValueError: DataParallel: ")
    assert other.startswith("CommunicationError: ")
    assert "rank 1 left: ValueError: " in other, other
