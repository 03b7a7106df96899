"""`pyops doctor`: what differs between the ranks of a launch that should be equal, what is equal
that should differ, and what is short.

    facts of all ranks -> checks, pure functions -> findings, each with its ranks and the fix
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyops.launch.facts import Facts, gathered
from pyops.launch.joining import join

__all__ = ["CHECKS", "Finding", "Report", "diagnosed", "examine"]

GIB = float(1 << 30)
MAX_CLOCK = 1.0  # seconds: files of two hosts would be compared by their times
MIN_DISK = 1 * GIB
MIN_SHARED = 256.0 * (1 << 20)  # containers have 64 MiB by default
MIN_MEMORY = 0.5 * GIB
MIN_FILES = 1024
SLOW = 4.0  # times the usual
LEAST_SECONDS = 2e-3  # of a message that may be called slow: below, it is the scheduler's noise


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    what: str
    """In a word: "versions", "clock", ..."""
    ranks: tuple[int, ...]
    """The ones to look at."""
    text: str
    """What was found, what was expected, and what to do."""


@dataclass(frozen=True)
class Report:
    """What was found."""

    facts: tuple[Facts, ...]
    """Of all ranks."""
    findings: tuple[Finding, ...]
    """Of all checks; none where all is well."""

    def text(self) -> str:
        """A table of the ranks, and a line for each finding."""
        marked = {rank for each in self.findings for rank in each.ranks}
        head = ("rank", "host", "local", "torch", "clock", "4 MiB", "memory", "disk", "/dev/shm")
        rows: list[tuple[str, ...]] = [head]
        for each in self.facts:
            rows.append(
                (
                    f"{'*' if each.rank in marked else ' '} {each.rank}",
                    each.host,
                    str(each.local_rank),
                    each.versions.get("torch", ""),
                    f"{each.clock:+.2f} s",
                    f"{each.seconds * 1e3:.1f} ms" if each.seconds else "-",
                    *(_gib(n) for n in (each.memory_free, each.disk_free, each.shared_free)),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        first = self.facts[0]
        title = f"{len(self.facts)} rank(s), started by: {first.launcher}"
        lines = [f"{each.what}: {each.text}" for each in self.findings]
        return "\n".join([title, *table, *(lines or ["nothing was found"])])


def examine(folder: Path) -> Report:
    """Join the ranks, gather what they find out, and compare it. Collective; the report is the same
    on all ranks.

    Args:
        folder: Where runs lie.

    Raises:
        LaunchError, TimeoutError: The ranks do not come together; see `pyops.launch.join`.
    """
    facts = gathered(join(), folder)
    return Report(tuple(facts), tuple(diagnosed(facts)))


def diagnosed(facts: Sequence[Facts]) -> list[Finding]:
    """What all checks find.

    Args:
        facts: Of all ranks, in rank order.
    """
    return [finding for check in CHECKS for finding in check(facts)]


def _different(
    facts: Sequence[Facts], what: str, tables: Sequence[Mapping[str, str]]
) -> list[Finding]:
    """Names whose values are not equal on all ranks; the ranks that are not as most are."""
    found = []
    for name in tables[0] if tables else ():
        holders: dict[str, list[int]] = defaultdict(list)
        for each, table in zip(facts, tables, strict=True):
            holders[table.get(name, "")].append(each.rank)
        usual = max(holders, key=lambda value: len(holders[value]))  # the first of equal ones
        if len(holders) == 1:
            continue
        count = len(holders.pop(usual))
        odd = tuple(sorted(rank for ranks in holders.values() for rank in ranks))
        other = "; ".join(
            f"{value or 'none'} on {_ranks(ranks)}" for value, ranks in holders.items()
        )
        found.append(
            Finding(
                what,
                odd,
                f"{name} is {usual or 'none'} on {count} of {len(facts)} ranks, but {other}"
                f"{_hosts(facts, odd)}; make them equal",
            )
        )
    return found


def check_versions(facts: Sequence[Facts]) -> list[Finding]:
    """Software that is not the same everywhere."""
    return _different(facts, "versions", [each.versions for each in facts])


def check_variables(facts: Sequence[Facts]) -> list[Finding]:
    """Variables of the environment that are not the same everywhere."""
    return _different(facts, "variables", [each.variables for each in facts])


def check_clocks(facts: Sequence[Facts]) -> list[Finding]:
    """Clocks that are more than a second from most others."""
    middle = statistics.median_low([each.clock for each in facts])
    return [
        Finding(
            "clock",
            (each.rank,),
            f"rank {each.rank} on {each.host} is {each.clock - middle:+.1f} s from the others; "
            "start chrony or ntpd there",
        )
        for each in facts
        if abs(each.clock - middle) > MAX_CLOCK
    ]


def check_interface(facts: Sequence[Facts]) -> list[Finding]:
    """Ranks of several hosts that would talk over the loopback, or over another network."""
    if len({each.host for each in facts}) == 1:
        return []
    found = []
    usual = Counter(_network(each.address) for each in facts).most_common(1)[0][0]
    for each in facts:
        if each.address.startswith("127."):
            why = f"reaches the others' host from {each.address}, which is this host itself"
        elif not each.address:
            why = "has no route to the host where the ranks meet"
        elif _network(each.address) != usual:
            why = f"has address {each.address}, in another network than most, {usual}.*"
        else:
            continue
        found.append(
            Finding(
                "interface",
                (each.rank,),
                f"rank {each.rank} on {each.host} {why}; set MASTER_ADDR to the address of the "
                "network between the hosts, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to its "
                "interface",
            )
        )
    return found


def check_folder(facts: Sequence[Facts]) -> list[Finding]:
    """A folder of runs that not all ranks share."""
    odd = tuple(each.rank for each in facts if not each.sees_folder)
    if not odd:
        return []
    if len(odd) == len(facts):
        text = f"{facts[0].folder} can't be written by rank 0; choose another folder"
    else:
        text = (
            f"{_ranks(odd)} did not see in {facts[0].folder} what rank 0 wrote there"
            f"{_hosts(facts, odd)}; put train.folder on a file system that all hosts share"
        )
    return [Finding("folder", odd, text)]


def check_shared_memory(facts: Sequence[Facts]) -> list[Finding]:
    """Hosts with too little of /dev/shm for collectives over shared memory."""
    return _short(
        facts,
        "shared memory",
        "shared_free",
        MIN_SHARED,
        "/dev/shm",
        "start the container with --shm-size=8g, or an emptyDir of medium Memory in Kubernetes",
    )


def check_disk(facts: Sequence[Facts]) -> list[Finding]:
    """Folders of runs that are nearly full."""
    return _short(
        facts, "disk", "disk_free", MIN_DISK, facts[0].folder, "a checkpoint may not fit: make room"
    )


def check_memory(facts: Sequence[Facts]) -> list[Finding]:
    """Hosts whose memory others have taken."""
    return _short(
        facts, "memory", "memory_free", MIN_MEMORY, "the host's memory", "end what holds it"
    )


def check_files(facts: Sequence[Facts]) -> list[Finding]:
    """Limits on open files below what many ranks need."""
    odd = tuple(each.rank for each in facts if each.open_files < MIN_FILES)
    if not odd:
        return []
    least = min(each.open_files for each in facts)
    return [
        Finding(
            "open files",
            odd,
            f"{_ranks(odd)} may open {least:g} files{_hosts(facts, odd)}, {MIN_FILES} are needed: "
            "ulimit -n 65536",
        )
    ]


def check_places(facts: Sequence[Facts]) -> list[Finding]:
    """Ranks of one host that are there twice: two launches, or two worlds, in one."""
    found = []
    places: dict[tuple[str, int], list[int]] = defaultdict(list)
    devices: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in facts:
        places[each.host, each.local_rank].append(each.rank)
        if each.device:
            devices[each.host, each.device].append(each.rank)
    for (host, local_rank), ranks in places.items():
        if len(ranks) > 1:
            found.append(
                Finding(
                    "local ranks",
                    tuple(ranks),
                    f"{_ranks(ranks)} all are local rank {local_rank} of {host}, and would take "
                    "the same device; give hosts names of their own, or the ranks LOCAL_RANK",
                )
            )
    for (host, device), ranks in devices.items():
        if len(ranks) > 1:
            found.append(
                Finding(
                    "device",
                    tuple(ranks),
                    f"{_ranks(ranks)} share the device {device} of {host}; give each rank one, by "
                    "LOCAL_RANK or CUDA_VISIBLE_DEVICES",
                )
            )
    return found


def check_devices(facts: Sequence[Facts]) -> list[Finding]:
    """Ranks without a device beside others that have one."""
    odd = tuple(each.rank for each in facts if not each.device)
    if not odd or len(odd) == len(facts):
        return []
    return [
        Finding(
            "device",
            odd,
            f"{_ranks(odd)} found no GPU for themselves{_hosts(facts, odd)}, the others did; start "
            "no more ranks on a host than it has GPUs, and look at CUDA_VISIBLE_DEVICES",
        )
    ]


def check_threads(facts: Sequence[Facts]) -> list[Finding]:
    """Hosts whose ranks have more threads together than cores."""
    found = []
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for each in facts:
        hosts[each.host].append(each)
    for host, ranks in hosts.items():
        threads, cores = sum(each.threads for each in ranks), max(each.cores for each in ranks)
        if len(ranks) > 1 and threads > 2 * cores:
            found.append(
                Finding(
                    "threads",
                    tuple(each.rank for each in ranks),
                    f"{len(ranks)} ranks of {host} have {threads} threads for {cores} cores; set "
                    f"OMP_NUM_THREADS to {max(1, cores // len(ranks))}",
                )
            )
    return found


def check_speed(facts: Sequence[Facts]) -> list[Finding]:
    """Links that are several times slower than the others of their kind, on one host or between
    two."""
    found = []
    for near in (True, False):
        links = [
            (each, facts[number - 1])
            for number, each in enumerate(facts)
            if (each.host == facts[number - 1].host) == near and each.seconds
        ]
        usual = statistics.median_low([each.seconds for each, _ in links]) if links else 0.0
        for each, before in links:
            if each.seconds > max(SLOW * usual, LEAST_SECONDS):
                found.append(
                    Finding(
                        "link",
                        (before.rank, each.rank),
                        f"4 MiB from rank {before.rank} ({before.host}) to rank {each.rank} "
                        f"({each.host}) took {each.seconds * 1e3:.0f} ms, usual here are "
                        f"{usual * 1e3:.0f} ms; look at that cable, card or neighbour",
                    )
                )
    return found


CHECKS = (
    check_versions,
    check_variables,
    check_clocks,
    check_interface,
    check_folder,
    check_shared_memory,
    check_disk,
    check_memory,
    check_files,
    check_places,
    check_devices,
    check_threads,
    check_speed,
)


def _short(
    facts: Sequence[Facts], what: str, field: str, least: float, where: str, fix: str
) -> list[Finding]:
    odd = tuple(each.rank for each in facts if getattr(each, field) < least)
    if not odd:
        return []
    smallest = min(getattr(each, field) for each in facts)
    return [
        Finding(
            what,
            odd,
            f"{where} has {_gib(smallest)} free for {_ranks(odd)}{_hosts(facts, odd)}, "
            f"{_gib(least)} are needed; {fix}",
        )
    ]


def _ranks(ranks: Iterable[int]) -> str:
    several = list(ranks)
    return f"rank{'s' if len(several) > 1 else ''} {', '.join(map(str, several))}"


def _hosts(facts: Sequence[Facts], ranks: Sequence[int]) -> str:
    return f" (on {', '.join(sorted({each.host for each in facts if each.rank in ranks}))})"


def _network(address: str) -> str:
    return address.rpartition(".")[0]


def _gib(nbytes: float) -> str:
    return "-" if nbytes == float("inf") else f"{nbytes / GIB:.3g} GiB"
