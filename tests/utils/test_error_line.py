"""Who says an error under torchrun, and that its summary has the line too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.utils import error_line
from weft.utils.error_line import print_error


@pytest.mark.parametrize(
    ("local_rank", "shared", "says"), [("0", True, True), ("1", True, False), ("1", False, True), ("", True, True)]
)
def test_the_first_rank_of_a_host_says_what_all_have(
    local_rank: str,
    shared: bool,
    says: bool,
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
    assert capsys.readouterr().err == (f"{line}\n" if says else "")
    assert file.exists() == says
    if says:  # as torch.distributed.elastic.multiprocessing.errors.ProcessFailure reads it
        message = json.loads(file.read_text())["message"]
        assert message["extraInfo"]["py_callstack"] == line
        assert int(message["extraInfo"]["timestamp"]) > 0
