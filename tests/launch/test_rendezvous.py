"""Processes of one attempt meet in a store that earlier attempts have used."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pyops.launch.interfaces import interface_trouble
from pyops.launch.rendezvous import Rendezvous
from pyops.launchers import LaunchError

pytestmark = pytest.mark.cpu_only

SOON = timedelta(seconds=20)


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, each on a thread of its own."""
    found: list[Any] = [None] * len(bodies)

    def run(i: int) -> None:
        try:
            found[i] = bodies[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def meet(store: dist.Store, size: int, *, after: float = 0.0, late: int = -1) -> list[Rendezvous]:
    def come(rank: int) -> Rendezvous:
        time.sleep(after if rank == late else 0.0)
        return Rendezvous(store, rank=rank, size=size, timeout=SOON)

    return together(*[lambda r=rank: come(r) for rank in range(size)])


def names(meetings: list[Rendezvous], key: str) -> set[bytes]:
    """What all find at a key that the first one wrote."""
    meetings[0].store.set(key, key)
    return {meeting.store.get(key) for meeting in meetings}


def test_attempts_have_stores_of_their_own():
    store = dist.HashStore()
    first, second, third = meet(store, 3), meet(store, 2), meet(store, 3)
    assert names(first, "a") == {b"a"}
    assert names(second, "b") == {b"b"}
    assert names(third, "c") == {b"c"}
    assert not any(meeting.store.check(["a"]) for meeting in second + third)
    assert not any(meeting.store.check(["b"]) for meeting in first + third)


@pytest.mark.parametrize("late", [0, 1])
def test_who_comes_late_is_waited_for(late):
    """And the marks of those who were there before are no answers to those who come now."""
    store = dist.HashStore()
    before = meet(store, 3)
    now = meet(store, 3, after=0.2, late=late)
    assert names(now, "a") == {b"a"}
    assert not any(meeting.store.check(["a"]) for meeting in before)


def test_a_process_that_left_a_mark_and_died_is_not_taken_for_its_successor():
    store = dist.HashStore()
    dist.PrefixStore("meeting", store).set("here 1", "of-the-dead")
    first, second = meet(store, 2, after=0.2, late=1)
    assert names([first, second], "a") == {b"a"}


def test_who_does_not_come_is_named():
    soon = timedelta(seconds=0.3)
    both = together(
        *[lambda r=r: Rendezvous(dist.HashStore(), rank=r, size=3, timeout=soon) for r in (0, 1)]
    )
    assert [type(error) for error in both] == [TimeoutError, TimeoutError]
    assert "rank 0 of 3 waited for ranks 1, 2 where they meet" in str(both[0])
    assert "rank 1 of 3 waited for rank 0" in str(both[1])
    store = dist.HashStore()
    some = together(*[lambda r=r: Rendezvous(store, rank=r, size=3, timeout=soon) for r in (0, 1)])
    assert "rank 0 of 3 waited for rank 2 where" in str(some[0])


def test_those_who_wait_hear_of_the_end():
    meetings = meet(dist.HashStore(), 3)
    assert together(lambda: meetings[0].end([1, 2], 15), *[m.until_over for m in meetings[1:]]) == [
        None,
        15,
        15,
    ]


def test_those_who_wait_notice_that_the_others_are_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SOON)
    stores = {0: server, 1: client}
    meetings = together(
        *[lambda r=r: Rendezvous(stores[r], rank=r, size=2, timeout=SOON) for r in (0, 1)]
    )
    waiting = meetings.pop()
    stores.clear()
    meetings.clear()
    del server
    with pytest.raises(RuntimeError, match="rank 1 had no part in the work, and who did is gone"):
        waiting.until_over(look_every=0.01)


@pytest.mark.parametrize("troubled", [0, 2])
def test_the_trouble_of_one_rank_ends_all_alike(troubled):
    store = dist.HashStore()

    def come(rank: int) -> Rendezvous:
        trouble = f"rank {rank} has none" if rank == troubled else ""
        return Rendezvous(store, rank=rank, size=3, timeout=SOON, trouble=trouble)

    ended = together(*[lambda r=rank: come(r) for rank in range(3)])
    assert [type(each) for each in ended] == [LaunchError] * 3
    assert {str(each) for each in ended} == {f"rank {troubled} has none"}
    assert names(meet(store, 3), "a") == {b"a"}, "the next attempt knows nothing of it"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME=ib0 on rank 3.*interface ib0, only"),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, "interface ib0, only eth0, eth1, lo; set GLOO"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "interface eth, only"),
        ({"NCCL_SOCKET_IFNAME": "ib,hsn"}, "NCCL_SOCKET_IFNAME=ib,hsn .*interface ib, hsn, only"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "interface eth, only .*or unset it"),
    ],
)
def test_an_interface_that_is_not_there_is_refused(variables, said):
    there = ["lo", "eth1", "eth0"]
    found = interface_trouble(3, nccl=True, environment=variables, there=there)
    assert re.search(said, found), found
    gloo_alone = interface_trouble(3, nccl=False, environment=variables, there=there)
    assert bool(gloo_alone) == ("GLOO_SOCKET_IFNAME" in variables)


@pytest.mark.parametrize("value", ["", "eth", "ib,eth1", "=eth0", "^lo", "eth0:1"])
def test_interfaces_that_nccl_finds_are_left_alone(value):
    there, variables = ["lo", "eth0", "eth1"], {"NCCL_SOCKET_IFNAME": value}
    assert interface_trouble(0, nccl=True, environment=variables, there=there) == ""
    assert interface_trouble(0, nccl=True, environment={"GLOO_SOCKET_IFNAME": "lo"}) == ""
