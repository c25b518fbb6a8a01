import numpy as np
from numpy.typing import NDArray
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
def cite(
    seed: int,
    num_papers: int,
    mean_references: float,
    class_of_topic: Tensor,
    first_topics: Tensor,
    topics: Tensor,
    first: int,
    last: int,
    num_threads: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def paper_features(
    seed: int, class_of_topic: Tensor, means: Tensor, first: int, x: Tensor, num_threads: int
) -> None: ...
def paper_draws(seed: int, stream: int, first: int, uniform: Tensor, num_threads: int) -> None: ...
def breadth_first(
    indptr: Tensor, indices: Tensor, indptr_t: Tensor, indices_t: Tensor, starts: Tensor, order: Tensor
) -> None: ...
def count_parts(indptr: Tensor, indices: Tensor, part: Tensor, counts: Tensor, num_threads: int) -> int: ...
def fennel(
    indptr: Tensor,
    indices: Tensor,
    indptr_t: Tensor,
    indices_t: Tensor,
    order: Tensor,
    num_parts: int,
    most: int,
    part: Tensor,
) -> None: ...
def refine(
    indptr: Tensor,
    indices: Tensor,
    order: Tensor,
    vertex_slack: float,
    edge_slack: float,
    remote_slack: float,
    max_passes: int,
    part: Tensor,
    counts: Tensor,
) -> int: ...
def spmm(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    neighbour_scale: Tensor | None,
    row_scale: Tensor | None,
    loop_scale: Tensor | None,
    x: Tensor,
    readable: int,
    y: Tensor,
    add: bool,
    num_threads: int,
) -> None: ...
def spmm_scatter(
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    target_scale: Tensor | None,
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

class EdgeDropout:
    def __init__(
        self, source_ids: Tensor, target_ids: Tensor, key: int, first_head: int, threshold: int, scale: float
    ) -> None: ...

def attend(
    indptr: Tensor,
    indices: Tensor,
    logit_src: Tensor,
    logit_dst: Tensor,
    loop: Tensor | None,
    bounds: Tensor,
    slope: float,
    h: Tensor,
    lse_known: bool,
    lse: Tensor,
    y: Tensor,
    plus: Tensor | None,
    share: Tensor | None,
    dropout: EdgeDropout | None,
    num_threads: int,
) -> None: ...
def attend_stats(
    logit_dst: Tensor,
    lse: Tensor,
    bounds: Tensor,
    slope: float,
    stats: Tensor,
    grad_y: Tensor | None,
    y: Tensor | None,
    plus: Tensor | None,
    share: Tensor | None,
    grad_logit_dst: Tensor | None,
    num_threads: int,
) -> None: ...
def attend_backward(
    indptr_t: Tensor,
    indices_t: Tensor,
    logit_src: Tensor,
    stats: Tensor,
    loop: Tensor | None,
    bounds: Tensor,
    slope: float,
    h: Tensor | None,
    grad_y: Tensor,
    grad_h: Tensor | None,
    grad_logit_src: Tensor | None,
    add: bool,
    dropout: EdgeDropout | None,
    num_threads: int,
) -> None: ...
def pair_logits(
    indptr: Tensor,
    indices: Tensor,
    loop: Tensor | None,
    bounds: Tensor,
    slope: float,
    left: Tensor,
    right: Tensor,
    attention: Tensor,
    features: Tensor | None,
    loop_features: Tensor | None,
    edge_map: Tensor | None,
    logits: Tensor,
    num_threads: int,
) -> None: ...
def pair_backward(
    indptr: Tensor,
    indices: Tensor,
    indptr_t: Tensor,
    indices_t: Tensor,
    edge_ids: Tensor,
    loop: Tensor | None,
    bounds: Tensor,
    slope: float,
    left: Tensor,
    right: Tensor,
    attention: Tensor,
    features: Tensor | None,
    loop_features: Tensor | None,
    edge_map: Tensor | None,
    grad_logits: Tensor,
    grad_left: Tensor,
    grad_right: Tensor,
    grad_attention: Tensor,
    grad_edge_map: Tensor | None,
    num_threads: int,
) -> None: ...
def edge_softmax(indptr: Tensor, loop: Tensor | None, logits: Tensor, alpha: Tensor, num_threads: int) -> None: ...
def drop_edges(
    indptr: Tensor, indices: Tensor, loop: Tensor | None, dropout: EdgeDropout, alpha: Tensor, num_threads: int
) -> None: ...
def weigh(
    indptr: Tensor,
    indices: Tensor,
    edge_ids: Tensor | None,
    loop: Tensor | None,
    bounds: Tensor,
    alpha: Tensor,
    x: Tensor,
    scale: float,
    y: Tensor,
    num_threads: int,
) -> None: ...
def weigh_backward(
    indptr: Tensor,
    indices: Tensor,
    loop: Tensor | None,
    bounds: Tensor,
    alpha: Tensor,
    x: Tensor,
    grad_y: Tensor,
    scale: float,
    last: bool,
    grad_logits: Tensor,
    num_threads: int,
) -> None: ...
def dropout(
    x: Tensor,
    rows: Tensor,
    key: int,
    first_column: int,
    threshold: int,
    scale: float,
    relu: bool,
    y: Tensor,
    num_threads: int,
) -> None: ...
def relu_dropout_backward(y: Tensor, grad_y: Tensor, scale: float, grad_x: Tensor, num_threads: int) -> None: ...
def cache_levels(
    indptr: Tensor,
    indices: Tensor,
    part: Tensor,
    own: int,
    wanted: Tensor,
    costs: Tensor,
    first: int,
    ratio: float,
    max_bytes: float,
    levels: Tensor,
    num_threads: int,
) -> tuple[float, bool]: ...
def gather_block(
    indptr: Tensor,
    indices: Tensor,
    part: Tensor,
    inputs: Tensor,
    num_targets: int,
    positions: Tensor | None,
    fetched: Tensor,
) -> int: ...
def least_cover(
    indptr: Tensor, indices: Tensor, first: int, bounds: Tensor, taken: Tensor, num_threads: int
) -> None: ...
def cut_rows(
    indptr: Tensor,
    indices: Tensor,
    num_columns: int,
    per_row: int,
    per_column: int,
    per_entry: int,
    own: bool,
    limit: int,
    bounds: Tensor,
) -> tuple[int, int]: ...
def add_rows(rows: Tensor, added: Tensor, target: Tensor, num_threads: int) -> None: ...
def distinct(
    values: Tensor,
    starts: Tensor,
    ranges: Tensor | None,
    num_numbers: int,
    found: Tensor,
    counts: Tensor,
    num_threads: int,
) -> None: ...
def find_missing(numbers: Tensor, others: Tensor, missing: Tensor) -> None: ...
def keep_rows(
    held: Tensor,
    held_uses: Tensor,
    read: Tensor,
    read_uses: Tensor,
    round: int,
    room: int,
    ahead: bool,
    numbers: Tensor,
    next_uses: Tensor,
    fresh: Tensor,
    leaving: Tensor,
) -> int: ...
def reorder_chunks(starts: Tensor, members: Tensor, orders: Tensor, num_threads: int) -> None: ...
def gather_file_rows(file: int, rows: Tensor, places: Tensor, out: Tensor, num_threads: int) -> None: ...
def add_file_rows(
    file: int,
    rows: Tensor,
    places: Tensor,
    values: Tensor,
    num_rows: int,
    block_rows: int,
    cleared: Tensor,
    num_threads: int,
) -> None: ...
def read_bytes(file: int, offset: int, out: Tensor, num_threads: int) -> None: ...
def write_bytes(file: int, offset: int, bytes: Tensor) -> None: ...
def release_pages(address: int, num_bytes: int) -> None: ...
def count_sample(
    indptr: Tensor,
    indices: Tensor,
    weight32: Tensor | None,
    weight64: Tensor | None,
    type16: Tensor | None,
    type32: Tensor | None,
    ids: Tensor | None,
    fanouts: Tensor,
    method: int,
    key: int,
    next_key: int,
    turn: float,
    targets: Tensor,
    rows: Tensor,
    block: Tensor,
    row_scale: Tensor | None,
    num_threads: int,
) -> None: ...
def fill_sample(
    indptr: Tensor,
    indices: Tensor,
    weight32: Tensor | None,
    weight64: Tensor | None,
    type16: Tensor | None,
    type32: Tensor | None,
    ids: Tensor | None,
    fanouts: Tensor,
    method: int,
    key: int,
    next_key: int,
    turn: float,
    rows: Tensor,
    block: Tensor,
    edge_ids: Tensor,
    sources: Tensor,
    scale: Tensor | None,
    num_threads: int,
) -> None: ...
def mark_ids(words: Tensor, pages: Tensor, num_ids: int, first: Tensor, others: Tensor, num_threads: int) -> int: ...
def place_ids(
    words: Tensor,
    pages: Tensor,
    num_ids: int,
    first: Tensor,
    others: Tensor,
    local: Tensor,
    positions: Tensor,
    fresh: Tensor,
    num_threads: int,
) -> None: ...
def run_messages(
    operations: Tensor,
    constants: Tensor,
    slot_offset: Tensor,
    memory_per_thread: int,
    tensors: list[Tensor],
    indptr: Tensor,
    sources: Tensor,
    order: Tensor | None,
    tile_edges: int,
    capacity: int,
    levels: Tensor,
    staged_width: Tensor,
    staged_tensor: Tensor,
    totals: Tensor,
    num_threads: int,
) -> None: ...
