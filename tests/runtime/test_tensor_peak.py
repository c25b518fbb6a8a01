"""TensorPeak measures the peak of bytes of tensors that are alive at the same time."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.runtime.memory.tensor_peak import TensorPeak
from weft.storage.host_rows import HostRows

KB = 256  # number of float32 elements in 1 KiB


def test_shared_storage_counts_once() -> None:
    before = torch.ones(10 * KB)
    with TensorPeak() as peak:
        first = torch.ones(4 * KB)
        assert (peak.alive, peak.most) == (4096, 4096)
        view, same = first.view(4, KB)[1:], first.detach()
        first.mul_(2)
        assert (peak.alive, peak.most) == (4096, 4096)
        del first, view
        assert peak.alive == 4096
        del same
        assert (peak.alive, peak.most) == (0, 4096)
        second = torch.ones(3 * KB) + 1  # Two tensors are alive at the same time.
        assert (peak.alive, peak.most) == (3072, 6144)
        before.add_(1)
        del before
        assert (peak.alive, peak.most) == (3072, 6144)
    assert len(second) == 3 * KB


def test_a_sparse_matrix_counts_its_indices_and_values() -> None:
    with torch.sparse.check_sparse_tensor_invariants(enable=True), TensorPeak() as peak:
        matrix = torch.sparse_coo_tensor(torch.zeros(2, KB, dtype=torch.int64), torch.ones(KB), (1, 1))
        assert peak.alive == (2 * 8 + 4) * KB
        del matrix
        assert peak.alive == 0


def test_fragmentation_increases_the_heap() -> None:
    """A free block that is too small for the next array remains free; empty tensors use no memory."""
    with TensorPeak() as peak:
        first, second, empty = torch.ones(KB), torch.ones(KB), torch.ones(0)
        del first
        third = torch.ones(2 * KB)
        del second, third, empty
    assert peak.most == 3 << 10
    assert peak.room == 4 << 10


def test_repeated_steps_fragment_the_heap() -> None:
    """In a second step, an array splits a free block of the first one, and a later array no longer fits."""
    with TensorPeak() as peak:
        first, second = torch.ones(6 * KB), torch.ones(2 * KB)
        del first
        others = [torch.ones(number * KB) for number in (2, 5, 4)]
        assert peak.most == 13 << 10
        del second, others
    assert peak.room == 14 << 10


def test_tensors_saved_for_backward_are_alive() -> None:
    weight = torch.ones(KB, requires_grad=True)
    with TensorPeak() as peak:
        y = weight.exp()  # saved for backward
        loss = y.sum()
        del y
        assert peak.alive == 1024 + 4
        loss.backward()
        del loss
    assert weight.grad is not None
    assert peak.alive == 1024
    assert peak.most <= 3 * 1024 + 8


def test_files_do_not_count(tmp_path: Path) -> None:
    rows = HostRows(KB, 4, torch.float32, tmp_path)
    with TensorPeak() as peak:
        mapped = rows.tensor()
        assert mapped.shape == (KB, 4)
        assert peak.most == 0
        read = rows.read(0, 10)
        assert peak.most == read.nbytes
