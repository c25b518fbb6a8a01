"""Host rows in files and in pinned memory equal plain tensors; files release memory and report full disks."""

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
    """Return ascending row ids: all, every third, a few far apart, runs with gaps, or none."""
    ids = torch.arange(num_rows)
    by_kind = {
        "all": ids,
        "third": ids[1::3],
        "sparse": ids[::997],
        "runs": ids[(ids // 50) % 3 > 0],
        "none": ids[:0],
    }
    return by_kind[kind]


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
        row_ids = some_rows(num_rows, kind)
        for slots in (
            torch.arange(len(row_ids)) + 2,
            torch.randperm(len(row_ids) + 5, generator=random)[: len(row_ids)],
        ):
            out = torch.full((len(row_ids) + 5, width), torch.nan, dtype=dtype)
            expected = out.clone()
            rows.gather(row_ids, out, slots)
            expected[slots] = plain[row_ids]
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
            values = torch.randn(len(out), width, dtype=dtype, generator=random)
            rows.add(row_ids, values, slots)
            plain[row_ids] += values[slots]
            assert torch.equal(rows.read(0, num_rows), plain), kind
    assert torch.equal(rows.tensor(), plain)
    rows.clear()
    assert torch.equal(rows.read(0, num_rows), torch.zeros_like(plain))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("num_rows", "width"), [(5000, 7), (20011, 65), (3, 9001)])
def test_cleared_rows_are_zero(make: Make, num_rows: int, width: int) -> None:
    """Cleared rows are zero in every later operation, although their file is not written at once."""
    random = torch.Generator().manual_seed(num_rows)
    plain = torch.randn(num_rows, width, generator=random)
    rows = make(num_rows, width, torch.float32)
    rows.write(0, plain)
    for turn in range(40):
        if turn % 5 == 0:
            rows.clear()
            plain.zero_()
        first, end = sorted(torch.randint(num_rows + 1, (2,), generator=random).tolist())
        row_ids = torch.rand(end - first, generator=random).topk((end - first) // (1 + turn % 7)).indices.sort().values
        row_ids += first
        added = torch.randn(len(row_ids), width, generator=random)
        what = turn % 4
        if what == 0:
            rows.add(row_ids, added)
            plain[row_ids] += added
        elif what == 1:
            rows.write(first, torch.ones(end - first, width))
            plain[first:end] = 1
        elif what == 2:
            assert torch.equal(rows.read(first, end), plain[first:end])
        else:
            rows.gather(row_ids, added)
            assert torch.equal(added, plain[row_ids])
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


def test_wrong_ids_are_refused(tmp_path: Path) -> None:
    rows, out = HostRows(10, 3, torch.float32, tmp_path), torch.zeros(4, 3)
    for ids, slots in (([2, 1], [0, 1]), ([1, 1], [0, 1]), ([-1, 1], [0, 1]), ([1, 2], [0, 4]), ([1, 2], [0])):
        for move in (rows.gather, rows.add):
            with pytest.raises(ValueError, match=r"rows|places"):
                move(torch.tensor(ids), out, torch.tensor(slots))
    if not __debug__:
        return  # python -O leaves out the asserts of weft
    with pytest.raises(AssertionError):
        rows.gather(torch.tensor([10]), out, torch.tensor([0]))
    with pytest.raises(AssertionError):
        rows.write(9, torch.zeros(2, 3))


def test_no_files_are_left_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def no_unnamed_files(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, mode)

    gc.collect()  # Close files of other tests.
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


def test_an_array_file_returns_stored_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for tensor, position in reversed(list(zip(put, stored, strict=True))):
        got = array_file.get(position)
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)


def test_a_new_file_is_zero_without_writing_pages() -> None:
    before = resident_file_bytes()
    whole = HostRows(1 << 17, 64, torch.float32).tensor()
    assert resident_file_bytes() - before < whole.nbytes // 8
    assert not whole.any()


def resident_file_bytes() -> int:
    """Return the resident bytes of files that this process has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssFile")]
    return int(line.split()[1]) << 10


def test_release_lowers_resident_memory_and_preserves_values(tmp_path: Path) -> None:
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


def test_release_does_not_change_other_tensors(tmp_path: Path) -> None:
    """Heap memory is never released (its pages would become zero), even at the address of an earlier mapping."""
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


def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    array_file = ArrayFile(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        message = (
            rf"{tmp_path}: no space for 12,000 bytes of vertex data \(No space.*\): give --scratch another folder$"
        )
        with pytest.raises(RunError, match=message):
            HostRows(1000, 3, torch.float32, tmp_path)
        with pytest.raises(RunError, match="--scratch another folder"):
            array_file.put(torch.ones(7))
        with pytest.raises(RunError, match="set TMPDIR to another folder"):
            HostRows(1000, 1, torch.float32)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert torch.equal(array_file.get(array_file.put(torch.ones(7))), torch.ones(7))


def test_a_limit_of_file_sizes_is_an_error(tmp_path: Path) -> None:
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


def test_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(RunError, match=rf"{name}: cannot store 4 bytes .*: give --scratch another folder"):
            HostRows(1, 1, torch.float32, tmp_path / name)
    with pytest.raises(InputError, match="missing: No such file or directory: give --scratch another folder"):
        free_bytes(tmp_path / "missing")
    assert free_bytes(tmp_path) > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="Permission denied"):
        HostRows(1, 1, torch.float32, tmp_path)
    tmp_path.chmod(0o700)


def test_host_rows_of_the_cpu_are_in_files(tmp_path: Path) -> None:
    assert isinstance(host_rows(2, 3, torch.float32, device=CPU, folder=None), HostRows)
    assert isinstance(host_rows(2, 3, torch.float32, device=CPU, folder=tmp_path), HostRows)
