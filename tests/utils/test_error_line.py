"""Under torchrun, one rank of a host prints an error, and torchrun's summary contains the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.utils import error_line
from weft.utils.error_line import print_error


@pytest.mark.parametrize(
    ("local_rank", "shared", "prints"), [("0", True, True), ("1", True, False), ("1", False, True), ("", True, True)]
)
def test_the_first_rank_of_a_host_prints_shared_errors(
    local_rank: str,
    shared: bool,
    prints: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setattr(error_line, "SECONDS_BEHIND", 0)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if not local_rank:
        monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    print_error("no\ngraph", shared=shared)
    line = "weft: error: no\\ngraph"
    assert capsys.readouterr().err == (f"{line}\n" if prints else "")
    assert file.exists() == prints
    if prints:  # in the format of torch.distributed.elastic.multiprocessing.errors.ProcessFailure
        message = json.loads(file.read_text())["message"]
        assert message["extraInfo"]["py_callstack"] == line
        assert int(message["extraInfo"]["timestamp"]) > 0
