"""Answers that are kept for the backward pass, with what else of them their gradient wants (HongTu, section 4.2).

Of a sum or a mean that is nothing; of attention, numbers by target from which the weights of its edges follow again, so
that it need not be made anew either. Maxima, attention by pairs and whole layers would have to keep rows by edge.
"""

from __future__ import annotations

from torch import Tensor

from weft.kernels import Attention, AttentionInputs, attend_keeping, attend_transposed, spmm_transposed
from weft.nn import Product, Topology
from weft.nn.phases import Attention as AsksAttention
from weft.nn.phases import Propagation, Question
from weft.nn.view import even_heads

Kept = tuple[Tensor, ...]
"""Rows [n, .] by target."""


def can_be_kept(question: Question) -> bool:
    """Whether the gradient of an answer can go by what is kept of it."""
    return isinstance(question, AsksAttention) or is_linear(question)


def is_linear(question: Question) -> bool:
    """Whether the gradient of the answer needs no rows."""
    return isinstance(question, Propagation) and question.reduce != "max"


def answered(question: AsksAttention, topology: Topology) -> tuple[Tensor, Kept]:
    """The answer [n, F], and what else is kept of it."""
    return attend_keeping(over(question, topology), question.h, question.logit_src, question.logit_dst)


def gradients(
    question: Question, topology: Topology, y: Tensor, kept: Kept, grad: Tensor, into: Tensor | None
) -> dict[str, Tensor]:
    """The gradients of what a question read, by name, from that of its answer y.

    Of a sum, y and x may be anything, and the gradient is added to `into`, if there is any.
    """
    if isinstance(question, Propagation):
        if into is not None:
            weighted = question.weighted and topology.adjacency.transpose.weight is not None
            product = Product(question.reduce, question.norm, weighted, 1)
            scale = topology.scale(product, grad.dtype)
            spmm_transposed(topology.adjacency, grad, scale=scale, weighted=weighted, into=into)
        return {}
    assert isinstance(question, AsksAttention)
    inputs = AttentionInputs(question.h, question.logit_src, question.logit_dst, y)
    grad_h, logits = attend_transposed(over(question, topology), inputs, kept, grad)
    return {"h": grad_h, "logit_src": logits.source, "logit_dst": logits.target}


def over(question: AsksAttention, topology: Topology) -> Attention:
    """What attention with all columns of every head is over."""
    bounds = even_heads(question.h, question.logit_src)
    return Attention(adj=topology.adjacency, bounds=bounds, loop=topology.loop, slope=question.slope, steps=1)
