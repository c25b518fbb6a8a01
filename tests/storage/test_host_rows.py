"""Rows in files and pinned rows against plain tensors; what a file takes, gives back, and says where it has no room."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.storage import unnamed_files
from weft.storage.host_rows import HostRows, MemoryRows, host_rows
from weft.storage.unnamed_files import ArrayFile, free_bytes, release
from weft.utils.errors import InputError, RunError

CPU = torch.device("cpu")
Make = Callable[[int, int, torch.dtype], HostRows | MemoryRows]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["file", "pinned"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "pinned":
        return lambda num_rows, width, dtype: MemoryRows(num_rows, width, dtype, CPU)
    return lambda num_rows, width, dtype: HostRows(num_rows, width, dtype, tmp_path)


def some_rows(num_rows: int, kind: str) -> Tensor:
    """Ascending: all, every third, a few far apart, runs with gaps, or none."""
    every = torch.arange(num_rows)
    chosen = {
        "all": every,
        "third": every[1::3],
        "sparse": every[::997],
        "runs": every[(every // 50) % 3 > 0],
        "none": every[:0],
    }
    return chosen[kind]


# The widths make rows of a few bytes, of odd sizes, and larger than what is read at once.
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("num_rows", "width"), [(20011, 7), (3001, 65), (3, 150001), (0, 5), (40, 0), (1, 1)])
def test_equals_a_tensor(make: Make, dtype: torch.dtype, num_rows: int, width: int) -> None:
    random = torch.Generator().manual_seed(0)
    rows, plain = make(num_rows, width, dtype), torch.randn(num_rows, width, dtype=dtype, generator=random)
    assert (rows.num_rows, rows.width, rows.dtype, rows.num_bytes) == (num_rows, width, dtype, plain.nbytes)
    assert torch.equal(rows.read(0, num_rows), torch.zeros_like(plain))
    half = num_rows // 2
    rows.write(half, plain[half:])
    rows.write(0, plain.t().contiguous().t()[:half])  # not contiguous
    assert torch.equal(rows.read(0, num_rows), plain)
    assert torch.equal(rows.read(half // 2, half), plain[half // 2 : half])
    for kind in ("all", "third", "sparse", "runs", "none"):
        chosen = some_rows(num_rows, kind)
        for places in (torch.arange(len(chosen)) + 2, torch.randperm(len(chosen) + 5, generator=random)[: len(chosen)]):
            out = torch.full((len(chosen) + 5, width), torch.nan, dtype=dtype)
            expected = out.clone()
            rows.gather(chosen, out, places)
            expected[places] = plain[chosen]
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
            values = torch.randn(len(out), width, dtype=dtype, generator=random)
            rows.add(chosen, values, places)
            plain[chosen] += values[places]
            assert torch.equal(rows.read(0, num_rows), plain), kind
    assert torch.equal(rows.tensor(), plain)
    rows.clear()
    assert torch.equal(rows.read(0, num_rows), torch.zeros_like(plain))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("num_rows", "width"), [(5000, 7), (20011, 65), (3, 9001)])
def test_cleared_rows_are_zero_whatever_follows(make: Make, num_rows: int, width: int) -> None:
    """They are kept as such, and written where something is added or asked for."""
    random = torch.Generator().manual_seed(num_rows)
    plain = torch.randn(num_rows, width, generator=random)
    rows = make(num_rows, width, torch.float32)
    rows.write(0, plain)
    for turn in range(40):
        if turn % 5 == 0:
            rows.clear()
            plain.zero_()
        first, end = sorted(torch.randint(num_rows + 1, (2,), generator=random).tolist())
        chosen = torch.rand(end - first, generator=random).topk((end - first) // (1 + turn % 7)).indices.sort().values
        chosen += first
        added = torch.randn(len(chosen), width, generator=random)
        what = turn % 4
        if what == 0:
            rows.add(chosen, added)
            plain[chosen] += added
        elif what == 1:
            rows.write(first, torch.ones(end - first, width))
            plain[first:end] = 1
        elif what == 2:
            assert torch.equal(rows.read(first, end), plain[first:end])
        else:
            rows.gather(chosen, added)
            assert torch.equal(added, plain[chosen])
    assert torch.equal(rows.tensor(), plain)


def test_a_tensor_shares_the_file_and_outlives_the_rows(tmp_path: Path) -> None:
    rows = HostRows(100, 3, torch.float32, tmp_path)
    whole = rows.tensor()
    whole[7] = 1
    assert rows.read(7, 8).sum() == 3
    rows.write(9, torch.full((1, 3), 2.0))
    assert whole[9].sum() == 6
    rows.close()
    del rows
    assert whole.sum() == 9


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    rows, out = HostRows(10, 3, torch.float32, tmp_path), torch.zeros(4, 3)
    for ids, places in (([2, 1], [0, 1]), ([1, 1], [0, 1]), ([-1, 1], [0, 1]), ([1, 2], [0, 4]), ([1, 2], [0])):
        for move in (rows.gather, rows.add):
            with pytest.raises(ValueError, match=r"rows|places"):
                move(torch.tensor(ids), out, torch.tensor(places))
    with pytest.raises(AssertionError):
        rows.gather(torch.tensor([10]), out, torch.tensor([0]))
    with pytest.raises(AssertionError):
        rows.write(9, torch.zeros(2, 3))


def test_nothing_is_left_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def no_unnamed_files(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, mode)

    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(os, "open", no_unnamed_files)
        rows, array_file = HostRows(10, 3, torch.float32, tmp_path), ArrayFile(tmp_path)
        rows.write(0, torch.ones(10, 3))
        array_file.put(torch.ones(5))
        assert rows.tensor().sum() == 30
        assert not list(tmp_path.iterdir())
        rows.close()
        rows.close()
        del rows, array_file
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_array_file_gives_back_what_was_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unnamed_files, "MAX_GROWTH", 100)
    array_file = ArrayFile(tmp_path)
    put = [
        torch.arange(7, dtype=torch.int32),
        torch.randn(3, 5, dtype=torch.float64).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.empty(0, 4),
        torch.arange(50000),
    ]
    stored = [array_file.put(tensor) for tensor in put]
    assert array_file.num_bytes == sum(tensor.nbytes for tensor in put)
    for tensor, one in reversed(list(zip(put, stored, strict=True))):
        got = array_file.get(one)
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)


def test_a_new_file_is_zero_without_a_page_written() -> None:
    before = resident_file_bytes()
    whole = HostRows(1 << 17, 64, torch.float32).tensor()
    assert resident_file_bytes() - before < whole.nbytes // 8
    assert not whole.any()


def resident_file_bytes() -> int:
    """Of this process: pages of files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssFile")]
    return int(line.split()[1]) << 10


def test_release_lowers_what_is_resident_and_keeps_the_numbers(tmp_path: Path) -> None:
    rows = HostRows(1 << 17, 64, torch.float32, tmp_path)  # 32 MiB
    for whole in (rows.tensor(), HostRows(1 << 17, 64, torch.float32).tensor()):
        before = resident_file_bytes()
        whole.copy_(torch.arange(64))
        filled = resident_file_bytes()
        assert filled - before > whole.nbytes // 2
        release(whole[: 1 << 16])
        assert filled - resident_file_bytes() > whole.nbytes // 4
        release(whole[:, 3:9])
        assert filled - resident_file_bytes() > whole.nbytes // 2
        assert torch.equal(whole, torch.arange(64).expand(1 << 17, 64).float())


def test_release_leaves_other_tensors_alone(tmp_path: Path) -> None:
    """Heap pages would come back as zeros: also those that took the place of a mapping."""
    mapped = HostRows(1 << 12, 64, torch.float32, tmp_path).tensor()
    for _ in range(20):
        del mapped
        heap = torch.ones(1 << 12, 64)
        release(heap)
        release(heap[5:9])
        assert heap.min() == 1
        mapped = HostRows(1 << 12, 64, torch.float32).tensor()
    assert len(unnamed_files._mapped) <= 2
    release(torch.empty(0, 3))
    release(mapped[:0])


def test_a_full_disk_is_one_line_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    array_file = ArrayFile(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        said = rf"{tmp_path}: no space for 12,000 bytes of vertex data \(No space.*\): give --scratch another folder$"
        with pytest.raises(RunError, match=said):
            HostRows(1000, 3, torch.float32, tmp_path)
        with pytest.raises(RunError, match="--scratch another folder"):
            array_file.put(torch.ones(7))
        with pytest.raises(RunError, match="set TMPDIR to another folder"):
            HostRows(1000, 1, torch.float32)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert torch.equal(array_file.get(array_file.put(torch.ones(7))), torch.ones(7))


def test_a_limit_of_file_sizes_is_such_an_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    rows = HostRows(1000, 3, torch.float32, tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        with pytest.raises(RunError, match="File too large"):
            HostRows(1000, 3, torch.float32, tmp_path)
        with pytest.raises(RunError, match="File too large"):
            rows.write(900, torch.ones(1, 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(RunError, match=rf"{name}: cannot store 4 bytes .*: give --scratch another folder"):
            HostRows(1, 1, torch.float32, tmp_path / name)
    with pytest.raises(InputError, match="missing: No such file or directory: give --scratch another folder"):
        free_bytes(tmp_path / "missing")
    assert free_bytes(tmp_path) > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="Permission denied"):
        HostRows(1, 1, torch.float32, tmp_path)
    tmp_path.chmod(0o700)


def test_which_rows_a_device_gets(tmp_path: Path) -> None:
    assert isinstance(host_rows(2, 3, torch.float32, device=CPU, folder=None), HostRows)
    assert isinstance(host_rows(2, 3, torch.float32, device=CPU, folder=tmp_path), HostRows)
