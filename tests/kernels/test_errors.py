"""Wrong arguments are a ValueError that names the argument; instruction sets are selected by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.lib.kernel_cases import graph
from weft.data.adjacency import Adjacency
from weft.kernels import (
    EdgeFeatures,
    Scale,
    attend,
    attend_edges,
    dot_logits,
    keyed_dropout,
    pair_logits,
    spmm,
    spmm_max,
)
from weft.runtime.native import _native

X = torch.ones(5, 4)
LOGITS = torch.zeros(5, 2)
ROWS = torch.arange(5)
VECTOR = torch.ones(4)


def block() -> Adjacency:
    return graph(3, 5, 8)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda adj: spmm(adj, X[:4]), r"x .* \[5, columns\]"),
        (lambda adj: spmm(adj, X[0]), r"x .* \[5, columns\]"),
        (lambda adj: spmm(adj, X.half()), "x .* float32, float64 or bfloat16"),
        (lambda adj: spmm(adj.with_weight(None), X, weighted=True), "have no weight"),
        (lambda adj: spmm(adj, X, weighted=True), "adj.cast"),
        (lambda adj: spmm(adj, X, scale=Scale(source=torch.ones(4))), "scale.source .* must be"),
        (lambda adj: spmm(adj, X, scale=Scale(target=torch.ones(5).double())), "scale.target .* must be"),
        (
            lambda adj: spmm(adj, X, scale=Scale(loop=torch.ones(5, requires_grad=True))),
            "scale.loop requires a gradient",
        ),
        (lambda _: spmm(block(), X[:3], scale=Scale(loop=torch.ones(5))), "scale.loop needs the targets"),
        (lambda adj: spmm_max(adj, X.int()), "x .* float32 or float64"),
        (lambda adj: attend(adj, X, LOGITS, LOGITS, bounds=[0, 4]), "bounds"),
        (lambda adj: attend(adj, X, LOGITS, LOGITS, bounds=[0, 2, 3]), "bounds"),
        (lambda adj: attend(adj, X, LOGITS, LOGITS, bounds=[0, 5, 4]), "bounds"),
        (lambda adj: attend(adj, X, LOGITS[:3], LOGITS, bounds=[0, 2, 4]), "logit_src"),
        (lambda adj: attend(adj, X, LOGITS, LOGITS[:, :1], bounds=[0, 2, 4]), "2 heads, logit_dst 1"),
        (lambda adj: attend(adj, X, LOGITS.double(), LOGITS, bounds=[0, 2, 4]), "must have the same dtype"),
        (lambda adj: attend(adj, X, LOGITS, LOGITS, bounds=[0, 2, 4], loop=torch.ones(5)), r"loop .* bool \[5\]"),
        (lambda adj: attend(adj, X, LOGITS, LOGITS, bounds=[0, 2, 4], steps=0), "steps=0"),
        (lambda _: attend(block(), X[:3], LOGITS[:3], LOGITS, bounds=[0, 2, 4], steps=2), "steps=2"),
        (lambda adj: pair_logits(adj, X, X[:3], VECTOR, bounds=[0, 4]), "right"),
        (lambda adj: pair_logits(adj, X, X, VECTOR[:2], bounds=[0, 4]), "right and attention .* 4 columns of left"),
        (lambda adj: pair_logits(adj, X, X, VECTOR, bounds=[0, 3]), "bounds"),
        (lambda adj: pair_logits(adj, X, X.double(), VECTOR, bounds=[0, 4]), "must have the same dtype"),
        (lambda adj: pair_logits(adj, X, X, VECTOR, X[:2], bounds=[0, 4]), "both or neither"),
        (lambda adj: dot_logits(adj, X, X.double(), bounds=[0, 4]), "the dtype of left"),
        (
            lambda adj: pair_logits(adj, X, X, VECTOR, X[:2], bounds=[0, 4], features=EdgeFeatures(torch.ones(12, 3))),
            r"features.edges .* \[12, 2\]",
        ),
        (
            lambda adj: pair_logits(
                adj, X, X, VECTOR, X[:2], bounds=[0, 4], loop=ROWS > 1, features=EdgeFeatures(torch.ones(12, 2))
            ),
            "features.loops is None",
        ),
        (lambda adj: attend_edges(adj, X, torch.ones(11, 2), bounds=[0, 2, 4]), r"logits .* \[12, heads\]"),
        (lambda adj: attend_edges(adj, X, torch.ones(12, 2), bounds=[0, 2, 4], loop=ROWS > 1), r"\[17, heads\]"),
        (lambda adj: attend_edges(adj, X, torch.ones(12, 1), bounds=[0, 2, 4]), "bounds"),
        (lambda _: keyed_dropout(X, ROWS, key=1, p=1.0), "p=1.0"),
        (lambda _: keyed_dropout(X, ROWS[:3], key=1, p=0.5), "rows"),
        (lambda _: keyed_dropout(X, ROWS.int(), key=1, p=0.5), "rows"),
        (lambda _: keyed_dropout(X[0], ROWS, key=1, p=0.5), "x "),
    ],
)
def test_errors_name_the_argument(call: Callable[[Adjacency], torch.Tensor], match: str):
    with pytest.raises(ValueError, match=match):
        call(graph(5, 5, 12))


def test_native_code_checks_its_arguments():
    """Native functions refuse arrays of wrong size, type or layout; they neither copy nor convert."""
    adj, y = graph(5, 5, 12), torch.empty(5, 4)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _native.spmm(adj.indptr, adj.indices, None, None, None, None, X, 4, torch.ones(4, 5).t(), False, 1)
    with pytest.raises(ValueError, match="rows of x must be whole"):
        _native.spmm(adj.indptr, adj.indices, None, None, None, None, torch.ones(4, 5).t(), 4, y, False, 1)
    with pytest.raises(ValueError, match="rows of x must be whole"):
        _native.spmm(adj.indptr, adj.indices, None, None, None, None, X, 5, y, False, 1)
    with pytest.raises(ValueError, match="readable"):
        _native.spmm(adj.indptr, adj.indices, None, None, None, None, X, 3, y, False, 1)
    with pytest.raises(ValueError, match="y must have"):
        _native.spmm(adj.indptr, adj.indices, None, None, None, None, X, 4, y[:4], False, 1)
    with pytest.raises(ValueError, match="must end at"):
        _native.spmm(adj.indptr, adj.indices[:3], None, None, None, None, X, 4, y, False, 1)


def test_unknown_instruction_set():
    with pytest.raises(ValueError, match="WEFT_ISA is one of baseline"):
        _native.set_isa("mmx")


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_environment_selects_the_instruction_set(isa):
    code = "from weft import _native; print(_native.current_isa())"
    environment = {**os.environ, "WEFT_ISA": isa}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == isa
