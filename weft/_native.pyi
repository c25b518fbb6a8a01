from torch import Tensor

INTERFACE: int

def supported_isas() -> list[str]: ...
def current_isa() -> str: ...
def set_isa(name: str) -> None: ...
def coo_to_csr(
    rows: Tensor, cols: Tensor, num_cols: int, indptr: Tensor, indices: Tensor, edge_ids: Tensor, num_threads: int
) -> None: ...
def transpose(
    indptr: Tensor, indices: Tensor, indptr_t: Tensor, indices_t: Tensor, edge_ids: Tensor, num_threads: int
) -> None: ...
def find_loops(indptr: Tensor, indices: Tensor, found: Tensor, num_threads: int) -> None: ...
def spmm(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    neighbour_scale: Tensor | None,
    row_scale: Tensor | None,
    loop_scale: Tensor | None,
    x: Tensor,
    y: Tensor,
    num_threads: int,
) -> None: ...
def spmm_max(indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor, position: Tensor, num_threads: int) -> None: ...
def spmm_max_backward(
    indptr: Tensor,
    indptr_t: Tensor,
    indices_t: Tensor,
    edge_ids: Tensor,
    position: Tensor,
    grad_y: Tensor,
    grad_x: Tensor,
    num_threads: int,
) -> None: ...
def attend_lse(
    indptr: Tensor,
    indices: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    loop: Tensor | None,
    slope: float,
    lse: Tensor,
    num_threads: int,
) -> None: ...
def attend_sum(
    indptr: Tensor,
    indices: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    lse: Tensor,
    loop: Tensor | None,
    bounds: Tensor,
    slope: float,
    h: Tensor,
    y: Tensor,
    num_threads: int,
) -> None: ...
def attend_stats(
    logit_dst: Tensor,
    lse: Tensor,
    bounds: Tensor,
    grad_y: Tensor | None,
    y: Tensor | None,
    stats: Tensor,
    num_threads: int,
) -> None: ...
def attend_backward(
    indptr_t: Tensor,
    indices_t: Tensor,
    edge_ids: Tensor,
    logit_src: Tensor,
    stats: Tensor,
    loop: Tensor | None,
    bounds: Tensor,
    slope: float,
    h: Tensor,
    grad_y: Tensor,
    first: bool,
    grad_h: Tensor | None,
    grad_logit_src: Tensor | None,
    grad_logit_dst: Tensor | None,
    grad_edge: Tensor | None,
    num_threads: int,
) -> None: ...
def attend_targets(indptr: Tensor, grad_edge: Tensor, grad_logit_dst: Tensor, num_threads: int) -> None: ...
def dropout(
    x: Tensor,
    rows: Tensor,
    key: int,
    first_column: int,
    threshold: int,
    scale: float,
    y: Tensor,
    num_threads: int,
) -> None: ...
