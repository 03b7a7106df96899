"""AsyncFile: every size and offset, by both engines, direct and buffered; errors that name the
file; nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

from pyops.offload.async_file import AsyncFile, aligned_empty
from pyops.ops.library import native

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(native() is None, reason="built without kernels"),
]


def engines() -> list[str]:
    """Those that this kernel lets us use; at least one."""
    found = ["threads"]
    try:
        AsyncFile("/tmp", engine="io_uring").close()
        found.append("io_uring")
    except OSError:
        pass
    return found


ENGINES = engines() if native() is not None else ["threads"]


@pytest.fixture(
    params=[(e, d) for e in ENGINES for d in (True, False)],
    ids=lambda p: f"{p[0]}-{'direct' if p[1] else 'buffered'}",
)
def settings(request):
    return {
        "engine": request.param[0],
        "direct": request.param[1],
        "piece_bytes": 8192,
        "depth": 4,
        "threads": 2,
    }


def noise(nbytes: int, *, misaligned: int = 0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    t = aligned_empty(nbytes + misaligned)[misaligned:]
    return t.random_(generator=generator)


@pytest.mark.parametrize("misaligned", [0, 1, 64])
def test_any_size_at_any_offset_byte_for_byte(tmp_path, settings, misaligned):
    whole = noise(70_000, seed=1)
    expected = whole.clone()
    file = AsyncFile(str(tmp_path), nbytes=whole.numel(), **settings)
    file.write(whole, offset=0).wait()
    for size in (0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 12_289, 40_000):
        for offset in (0, 1, 512, 4095, 4096, 8191, 16_384):
            part = noise(size, misaligned=misaligned, seed=size + offset)
            file.write(part, offset=offset).wait()
            expected[offset : offset + size] = part
            back = noise(size + 700, misaligned=misaligned)
            file.read(back, offset=offset).wait()
            assert torch.equal(back, expected[offset : offset + size + 700]), (size, offset)
    back = torch.empty(70_000, dtype=torch.uint8)
    assert torch.equal(file.read(back, offset=0).wait(), expected)
    file.close()


def test_many_at_once_each_to_its_place(tmp_path, settings):
    file = AsyncFile(str(tmp_path), nbytes=1 << 20, **settings)
    parts = [noise(size, misaligned=size % 3, seed=size) for size in range(3000, 9000, 61)]
    offsets = [
        sum(p.numel() for p in parts[:i]) for i in range(len(parts))
    ]  # neighbours share blocks
    for transfer in [file.write(p, offset=o) for p, o in zip(parts, offsets, strict=True)]:
        transfer.wait()
    backs = [torch.zeros_like(p) for p in parts]
    transfers = [file.read(b, offset=o) for b, o in zip(backs, offsets, strict=True)]
    for transfer in reversed(transfers):
        transfer.wait()
        assert transfer.done()
    assert all(torch.equal(a, b) for a, b in zip(parts, backs, strict=True))
    assert file.bytes_written == file.bytes_read == sum(p.numel() for p in parts)


def test_room_reads_as_zeros_and_other_dtypes_work(tmp_path, settings):
    file = AsyncFile(str(tmp_path), nbytes=10_001, **settings)
    assert not file.read(noise(10_001), offset=0).wait().any()
    x = torch.randn(1000, dtype=torch.bfloat16)
    file.write(x, offset=4).wait()
    assert torch.equal(file.read(torch.empty_like(x), offset=4).wait(), x)


def test_direct_bypasses_the_page_cache_where_the_file_system_takes_it(tmp_path):
    file = AsyncFile(str(tmp_path), nbytes=4096)
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT))
        takes = True
    except OSError:
        takes = False
    assert file.direct == takes


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at hand")
def test_a_file_system_in_memory(settings):
    file = AsyncFile("/dev/shm", nbytes=10_000, **settings)
    x = noise(9_999)
    file.write(x, offset=1).wait()
    assert torch.equal(file.read(torch.empty_like(x), offset=1).wait(), x)


def test_reading_past_the_end_says_how_much_there_was(tmp_path, settings):
    file = AsyncFile(str(tmp_path), nbytes=5000, **settings)
    with pytest.raises(
        OSError, match=r"read of 3000 bytes at offset 4096, \d+ of \d+ there at"
    ) as caught:
        file.read(torch.empty(3000, dtype=torch.uint8), offset=4096).wait()
    assert caught.value.filename == file.path
    assert not file.read(torch.ones(5000, dtype=torch.uint8), offset=0).wait().any(), (
        "the file is as good as before"
    )


@contextlib.contextmanager
def files_of_10_000_bytes():
    """No file may be larger: writes across that are short, then fail. As a disk that fills up,
    without being root. It is true of what the tests' results are written to as well, so only as
    long as it has to be."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@files_of_10_000_bytes()
def test_a_write_that_is_cut_short_raises_and_names_the_file(tmp_path, settings):
    file = AsyncFile(str(tmp_path), **settings)
    x = noise(6000)
    file.write(x, offset=0).wait()
    with pytest.raises(
        OSError, match=r"File too large \(write of 12000 bytes at offset 4000.*written"
    ) as caught:
        file.write(noise(12_000), offset=4000).wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, file.path)
    assert torch.equal(file.read(torch.empty(4000, dtype=torch.uint8), offset=0).wait(), x[:4000])


@files_of_10_000_bytes()
def test_no_room_is_known_before_anything_is_written(tmp_path, settings):
    with pytest.raises(OSError, match=r"making room for 20000 bytes.*pyops-") as caught:
        AsyncFile(str(tmp_path), nbytes=20_000, **settings)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


def test_a_full_disk_raises_and_names_the_file(tmp_path, settings):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs to mount a small file system")
    try:
        with pytest.raises(OSError, match="No space left on device") as caught:
            AsyncFile(str(folder), nbytes=1 << 20, **settings)
        assert caught.value.errno == errno.ENOSPC
        file = AsyncFile(str(folder), **settings)
        with pytest.raises(
            OSError,
            match=r"No space left on device \(write of 100000 bytes at offset "
            rf"7.*{re.escape(file.path)}",
        ):
            file.write(noise(100_000), offset=7).wait()
        file.close()
        AsyncFile(str(folder), nbytes=32 << 10, **settings).close()  # its space came back
    finally:
        subprocess.run(["umount", folder], check=True)


@files_of_10_000_bytes()
def test_a_failed_transfer_spoils_no_other(tmp_path, settings):
    file = AsyncFile(str(tmp_path), **settings)
    x = noise(2000)
    bad, good = file.write(noise(5000), offset=9000), file.write(x, offset=0)
    good.wait()
    with pytest.raises(OSError, match="File too large"):
        bad.wait()
    assert torch.equal(file.read(torch.empty_like(x), offset=0).wait(), x)


def test_names(tmp_path, settings):
    file = AsyncFile(str(tmp_path), nbytes=100, **settings)
    assert os.listdir(tmp_path) == [], "nothing that a killed process would leave"
    assert file.path.startswith(str(tmp_path))
    kept = AsyncFile(str(tmp_path / "kept"), temporary=False, **settings)
    kept.write(noise(5001, seed=9), offset=0).wait()
    kept.close()
    assert (tmp_path / "kept").read_bytes() == noise(5001, seed=9).numpy().tobytes()
    again = AsyncFile(str(tmp_path / "kept"), temporary=False, **settings)
    assert torch.equal(
        again.read(torch.empty(5001, dtype=torch.uint8), offset=0).wait(), noise(5001, seed=9)
    )


def test_what_it_refuses(tmp_path):
    with pytest.raises(ValueError, match="is no folder; make it first"):
        AsyncFile(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="missing/file"):
        AsyncFile(str(tmp_path / "missing" / "file"), temporary=False)
    with pytest.raises(ValueError, match="engine is 'aio'; choose auto, io_uring or threads"):
        AsyncFile(str(tmp_path), engine="aio")
    assert os.listdir(tmp_path) == []
    file = AsyncFile(str(tmp_path), nbytes=100)
    with pytest.raises(ValueError, match="expected a contiguous one in host memory"):
        file.write(torch.zeros(4, 4).t()[1:], offset=0)
    with pytest.raises(ValueError, match="offset must be 0 or more"):
        file.read(torch.zeros(4), offset=-1)
    file.close()
    with pytest.raises(OSError, match="this file is closed"):
        file.read(torch.zeros(4), offset=0)


def test_memory_stays_until_a_transfer_that_nobody_waits_for_is_over(tmp_path, settings):
    file = AsyncFile(str(tmp_path), nbytes=1 << 20, **settings)
    alive = []
    for i in range(3):
        x = noise(300_001, seed=i)
        alive.append(weakref.ref(x))
        file.write(x, offset=i * 300_001)
        del x
    assert all(r() is not None for r in alive)
    file.close()
    assert all(r() is None for r in alive)


def test_closing_waits_for_what_is_under_way(tmp_path, settings):
    file = AsyncFile(str(tmp_path / "kept"), temporary=False, **settings)
    x = noise(300_000)
    file.write(x, offset=0)
    file.close()
    assert (tmp_path / "kept").read_bytes() == x.numpy().tobytes()


PROGRAM = """
    import ctypes, os, signal, sys
    from pyops._native import AsyncFile  # without torch: a process starts in no time
    memory = ctypes.create_string_buffer(b"1" * (1 << 20))
    file = AsyncFile(os.path.join(sys.argv[1], "file"), 1 << 20, sys.argv[2])
    going = file.write(ctypes.addressof(memory), 1 << 20, 0, memory)
    pid = os.fork() if sys.argv[3] == "fork" else 1
    if pid == 0:
        try:
            file.read(ctypes.addressof(memory), 8, 0)
        except OSError as error:
            assert "before a fork" in str(error)
            sys.exit(3)  # and leaves the parent's threads alone
    if sys.argv[3] == "fork":
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        file.wait(going)
        back = ctypes.create_string_buffer(9)
        file.wait(file.read(ctypes.addressof(back), 9, 77))
        assert back.raw == b"1" * 9
    if sys.argv[3] == "raise":
        raise RuntimeError("a failure of the program")
    if sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("return", 0), ("raise", 1), ("kill", -signal.SIGKILL), ("fork", 0)]
)
def test_whatever_ends_the_process_nothing_is_left(tmp_path, end, code):
    for engine in ENGINES:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), engine, end]
        root = Path(__file__).resolve().parents[2]
        found = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert found.returncode == code, found.stderr
        assert os.listdir(tmp_path) == []


def test_a_page_goes_one_way_so_that_no_old_bytes_come_back(tmp_path):
    """Sizes that end within a page, written over and over; seldom seen to fail, but never with
    pages that go one way."""
    file = AsyncFile(str(tmp_path), nbytes=5 * 4096)
    if file.direct:
        assert file._file.alignment % os.sysconf("SC_PAGESIZE") == 0
    sizes = (896, 1300, 4096 + 700, 2048)
    for turn in range(150):
        written = [torch.full((size,), turn + 1, dtype=torch.uint8) for size in sizes]
        offsets = [0, 4096, 8192, 16384]
        for going in [file.write(t, offset=at) for t, at in zip(written, offsets, strict=True)]:
            going.wait()
        found = [torch.empty_like(t) for t in written]
        for coming in [file.read(t, offset=at) for t, at in zip(found, offsets, strict=True)]:
            coming.wait()
        assert all(torch.equal(a, b) for a, b in zip(found, written, strict=True)), turn
    file.close()
