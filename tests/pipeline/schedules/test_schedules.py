"""Every schedule, for many numbers of ranks and micro-batches: valid, complete, and as long and as
large as the papers say."""

from __future__ import annotations

import itertools

import pytest

from pyops.pipeline import NAMES, Action, Costs, Schedule, custom, schedule, simulate
from tests.grids import full

pytestmark = pytest.mark.cpu_only

RANKS, MICROBATCHES, STAGES = range(1, 9), range(1, 33), range(1, 5)
GRID = list(itertools.product(RANKS, MICROBATCHES))
COARSE = list(
    itertools.product(RANKS, (1, 2, 3, 4, 5, 7, 8, 12, 16, 21, 24, 32))
)  # for the families of many stages
FEW = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 5, 8, 16, 21)))
# Those that divide the others, those that do not, more ranks than micro-batches, and a large one.
SMALL = [*itertools.product((1, 2, 3, 5), (1, 2, 5, 10)), (8, 16)]
GRIDS = [pytest.param(SMALL, id="small"), full(FEW, id="few"), full(COARSE, id="coarse")]
CLOSED_FORMS = [
    pytest.param(SMALL, id="small"),
    full([*FEW, (8, 32)], id="few"),
    full(GRID, id="all"),
]
EVEN = Costs(forward=1, input_gradient=1, weight_gradient=1)


def peaks(made: Schedule) -> list[int]:
    return [made.peak(rank) for rank in range(made.num_ranks)]


def make(name: str, k: int, m: int, **options: object) -> Schedule:
    return schedule(name, num_stages=k, num_microbatches=m, **options)


def test_one_f_one_b_as_people_draw_it():
    assert str(make("1f1b", 3, 4)).splitlines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_gpipe_and_zbv_of_two_ranks():
    assert str(make("gpipe", 2, 2)).splitlines() == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert str(make("gpipe", 2, 2, reverse=True)).splitlines()[0] == "0F0 0F1 0B1 0B0"
    v = make("zbv", 2, 3)
    assert v.rank_of == (0, 1, 1, 0)
    assert str(v).splitlines() == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


@pytest.mark.parametrize("grid", CLOSED_FORMS)
def test_gpipe_takes_its_closed_form(grid):
    for k, m in grid:
        made = make("gpipe", k, m)
        assert simulate(made, EVEN).makespan == 3 * (m + k - 1), (k, m)
        assert peaks(made) == [m] * k


@pytest.mark.parametrize("grid", CLOSED_FORMS)
@pytest.mark.parametrize("warmup", ["a", "b"])
def test_one_f_one_b_takes_its_closed_form(warmup: str, grid):
    for k, m in grid:
        made = make("1f1b", k, m, warmup=warmup)
        assert simulate(made, EVEN).makespan == 3 * (m + k - 1), (k, m)
        deep = [k - s if warmup == "a" else 2 * (k - s) - 1 for s in range(k)]
        assert peaks(made) == [min(m, n) for n in deep], (k, m)


def test_a_warmup_of_a_number():
    assert peaks(make("1f1b", 4, 16, warmup=6)) == [6, 5, 4, 3]
    assert peaks(make("1f1b", 4, 16, warmup=1)) == [4, 3, 2, 1]
    assert peaks(make("1f1b", 4, 3, warmup=100)) == [3, 3, 3, 3]


@pytest.mark.parametrize("grid", GRIDS)
def test_interleaved_takes_its_closed_form_where_ranks_divide_micro_batches(grid):
    for (k, m), v in itertools.product(grid, STAGES):
        made = make("interleaved", k, m, v=v)
        found = simulate(made, EVEN).makespan
        if m % k == 0:
            assert found == 3 * (v * m + k - 1), (k, m, v)
        else:
            assert found >= 3 * v * m, (k, m, v)
        if m % k == 0 and m > k:
            assert peaks(made) == [2 * (k - 1 - r) + (v - 1) * k + 1 for r in range(k)], (k, m, v)


@pytest.mark.parametrize("grid", CLOSED_FORMS)
def test_zb1p_takes_its_closed_form(grid):
    for k, m in grid:
        made = make("zb1p", k, m)
        if m >= k:
            assert simulate(made, EVEN).makespan == 3 * m + k - 1, (k, m)
        assert max(peaks(made)) == min(m, k), (k, m)


@pytest.mark.parametrize("grid", GRIDS)
def test_interleaved_zb_and_zbv_are_complete_and_lose_little(grid):
    for k, m in grid:
        for v in STAGES:
            simulate(make("interleaved_zb", k, m, v=v), EVEN)
        made = make("zbv", k, m)
        if m >= 2 * k:
            assert simulate(made, EVEN).makespan == 6 * m + k - 1, (k, m)
        assert max(peaks(made)) <= 2 * k, (k, m)


@pytest.mark.parametrize(
    ("name", "options", "expected", "peak"),
    # step overhead over ideal, K = 8, M = 32, F = 1: I = W = 1 | 1.25, .75 | 1.1, .6 | 1.25, .75
    # and latency .1
    [
        ("gpipe", {}, (0.219, 0.219, 0.219, 0.233), 32),
        ("1f1b", {}, (0.219, 0.219, 0.219, 0.290), 8),
        ("zb1p", {}, (0.073, 0.109, 0.122, 0.139), 8),
        ("interleaved", {"v": 2}, (0.109, 0.109, 0.109, 0.141), 11.5),
        ("interleaved", {"v": 4}, (0.055, 0.055, 0.055, 0.119), 9.75),
        ("interleaved_zb", {"v": 2}, (0.036, 0.055, 0.061, 0.092), 8),
        ("zbv", {}, (0.036, 0.046, 0.045, 0.080), 8),
    ],
)
def test_overheads_of_eight_ranks(
    name: str, options: dict[str, int], expected: tuple[float, ...], peak: float
):
    made = make(name, 8, 32, **options)
    v = made.num_stages // made.num_ranks
    cases = [(1, 1, 1, 0), (1, 1.25, 0.75, 0), (1, 1.1, 0.6, 0), (1, 1.25, 0.75, 0.1)]
    found = [simulate(made, Costs(f / v, i / v, w / v, latency=t)).overhead for f, i, w, t in cases]
    assert [round(x, 3) for x in found] == list(expected)
    assert max(peaks(made)) / v == peak


@pytest.mark.parametrize("latency", [0.1, 0.3])
def test_more_warmup_hides_latency(latency: float):
    costs = Costs(1, 1, 1, latency=latency)
    plain, eager = (simulate(make("1f1b", 8, 32, warmup=w), costs).overhead for w in "ab")
    assert (round(plain, 3), round(eager, 3)) == (
        (0.29, 0.233) if latency == 0.1 else (0.431, 0.262)
    )


# --------------------------------------------------------------------------------------------------
# asynchronous


@pytest.mark.parametrize("k", range(1, 7))
def test_pipedream_keeps_a_version_for_each_rank_that_follows(k: int):
    made = make("pipedream", k, 6 * k)
    assert [made.versions_kept(s) for s in range(k)] == [k - s for s in range(k)]
    assert [made.delay(s) for s in range(k)] == [k - 1 - s for s in range(k)]
    for m in range(
        k, 6 * k
    ):  # backward meets the weights of its forward: k - 1 - s steps before those of its own step
        for s in range(k):
            assert (
                made.version(Action(s, "B", m))
                == made.version(Action(s, "F", m))
                == m - (k - 1 - s)
            )


@pytest.mark.parametrize("k", range(1, 7))
def test_vertical_sync_meets_one_version_everywhere(k: int):
    made = make("pipedream", k, 6 * k, vertical_sync=True)
    for m in range(6 * k):
        assert {made.version(Action(s, "F", m)) for s in range(k)} == {max(0, m - k + 1)}
    assert [made.versions_kept(s) for s in range(k)] == [k] * k


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("more", [0, 3])
def test_two_versions_are_enough(k: int, more: int):
    made = make("pipedream_2bw", k, 6 * (k + more), accumulate=k + more)
    assert [made.versions_kept(s) for s in range(k)] == [2] * k
    assert [made.delay(s) for s in range(k)] == [1] * k


@pytest.mark.parametrize("k", range(1, 7))
def test_pipemare_keeps_one(k: int):
    made = make("pipemare", k, 12 * k, warmup="b")
    assert [made.delay(s) for s in range(k)] == [2 * (k - 1 - s) for s in range(k)]
    assert made.version(Action(0, "B", 8 * k)) == 8 * k
    assert [made.versions_kept(s) for s in range(k)] == [1] * k


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "pipemare"])
def test_without_a_flush_only_the_ends_are_idle(name: str):
    for k, m in ((4, 200), (1, 8), (6, 5)):
        made = make(name, k, m)
        assert simulate(made, EVEN).makespan == 3 * (m + k - 1)


# --------------------------------------------------------------------------------------------------
# what follows


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_recomputation_stands_before_each_backward(mode: str):
    made = make("1f1b", 3, 4).with_recompute(mode)
    count = sum(action.kind == "R" for _, action in made)
    assert count == 3 * {"always": 4, "except_last": 3, "never": 0}[mode]
    for order in made.ranks:
        for first, second in itertools.pairwise(order):
            if first.kind == "R":
                assert (second.kind, second.stage, second.number) == (
                    "B",
                    first.stage,
                    first.number,
                )
    # a rank that waits for a gradient recomputes meanwhile: only the last rank's recomputation
    # costs time while the pipe fills
    assert simulate(made, EVEN).makespan < 4 * (4 + 3 - 1) or mode == "always"


def test_buffers_are_used_again():
    made = make("1f1b", 4, 16)
    for stage in range(4):
        slots = made.slots(stage)
        assert max(slots.values()) + 1 == made.peak(stage)
        held: dict[int, int] = {}
        for action in made.ranks[stage]:
            if action.kind == "F":
                assert slots[action.number] not in held.values()
                held[action.number] = slots[action.number]
            else:
                del held[action.number]


def test_gradients_are_whole_after_the_last_action_that_adds_to_them():
    made = make("zb1p", 3, 4)
    for stage, place in enumerate(made.last_gradients):
        rest = made.ranks[stage][place + 1 :]
        assert made.ranks[stage][place].kind == "W"
        assert not [a for a in rest if a.kind == "W"]


def test_memory_of_recomputation():
    costs = Costs(1, 1, 1, kept=10.0, kept_input=1.0, weights=100.0)
    plain = simulate(make("gpipe", 2, 8), costs)
    again = simulate(make("gpipe", 2, 8).with_recompute("always"), costs)
    assert plain.memory == (180.0, 180.0)
    assert again.memory == (100 + 8 + 9.0,) * 2
    assert again.makespan > plain.makespan


def test_bandwidth_is_shared_by_what_follows_on_a_channel():
    made = make("gpipe", 2, 3)
    slow = simulate(made, Costs(1, 1, 1, activation=2.0, bandwidth=1.0))
    begins = sorted(
        begin for transfer, (begin, _) in slow.transfers.items() if transfer.kind == "F"
    )
    assert begins == [1.0, 3.0, 5.0]
    assert slow.actions[Action(1, "F", 2)] == (7.0, 8.0)


# --------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["0F0 0F0 0B0"], r"does 0F0 twice: 0F0 \[0F0\] 0B0"),
        (["0F0 0F1 0B0"], "never does 0B1"),
        (["0F0 0B0 0B1", "1F0 1B0 1B1 1F1"], "never does 0F1"),
        (["0B0 0F0"], r"does 0B0 before 0F0, whose value it takes: \[0B0\] 0F0"),
        (["0F0 0W0 0I0"], "does 0W0 before 0I0"),
        (["0F0 0I0 0W0 0B0"], "does 0B0 in a schedule that has I and W"),
        (["0F0 0B0 1B0", "1F0"], r"rank 0 does 1B0, but its stages are \[0\]: 0F0 0B0 \[1B0\]"),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            r"deadlocks, each waits for the next: .*0B0 <- .*1B0 <- .*on rank 0",
        ),
        (["0F0 0U0 0B0"], "steps stage 0 while 1 micro-batches are between forward and backward"),
        (["0F0 0B0 0U1"], "0U1 should be step 0"),
        (["0F0 0Q0"], "'0Q0' is no action"),
        (["1F0 1B0"], "stage 0 is on no rank"),
        (["0F0 0B0 0R0"], "does 0B0 before 0R0"),
    ],
)
def test_orders_that_cannot_run_are_refused(orders: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        custom(orders)


def test_backward_before_forward_on_the_last_rank():
    with pytest.raises(ValueError, match="does 1B0 before 1F0"):
        custom(["0F0 0B0", "1B0 1F0"])


def test_more_than_two_versions_are_refused():
    with pytest.raises(ValueError, match="only the last two versions are kept"):
        custom(["0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0B3 0U3"], weights="two", accumulate=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "gpip"}, "no schedule 'gpip'; there are gpipe, 1f1b"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_microbatches": 2.0}, "num_microbatches is 2.0"),
        ({"v": 2}, "gpipe has no option 'v'; it has reverse"),
        ({"name": "1f1b", "warmup": "c"}, "warmup is 'c'"),
        ({"name": "pipedream_2bw", "accumulate": 2}, "set it to 4 or more"),
        ({"name": "interleaved", "v": 0}, "v is 0"),
    ],
)
def test_names_numbers_and_options_are_checked(call: dict[str, object], message: str):
    arguments = {"name": "gpipe", "num_stages": 4, "num_microbatches": 8} | call
    with pytest.raises(ValueError, match=message):
        schedule(arguments.pop("name"), **arguments)  # type: ignore[arg-type]


def test_costs_are_checked():
    with pytest.raises(ValueError, match=r"costs\.forward has 2 numbers, but there is a stage 2"):
        simulate(make("gpipe", 3, 2), Costs(forward=[1.0, 2.0]))
    with pytest.raises(ValueError, match=r"costs\.kept of stage 0 is -1"):
        simulate(make("gpipe", 3, 2), Costs(kept=-1.0))


def test_every_name_makes_any_size():
    for name in NAMES:
        for k, m in ((1, 1), (3, 1), (2, 5), (5, 2)):
            made = make(name, k, m)
            assert (
                custom(
                    [" ".join(map(str, order)) for order in made.ranks],
                    rank_of=made.rank_of,
                    weights=made.weights,
                    **{"accumulate": made.options.get("accumulate", 1)},
                ).ranks
                == made.ranks
            )


def test_memory_between_the_two_parts_of_a_backward():
    made = custom(["0F0 0I0 0F1 0I1 0W0 0W1"])
    assert simulate(made, Costs(kept=10.0)).memory == (20.0,)
    assert simulate(made, Costs(kept=10.0, deferred_weight_grad=3.0)).memory == (13.0,)
    assert simulate(made, Costs(kept=10.0, deferred_weight_grad=30.0)).memory == (60.0,)
    assert simulate(
        custom(["0F0 0I0 0W0 0F1 0I1 0W1"]), Costs(kept=10.0, deferred_weight_grad=30.0)
    ).memory == (30.0,)
    with pytest.raises(ValueError, match=r"costs\.deferred_weight_grad of stage 0 is -1"):
        simulate(made, Costs(deferred_weight_grad=-1.0))
