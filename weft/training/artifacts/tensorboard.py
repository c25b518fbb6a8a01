"""Event files for TensorBoard, which `tensorboard --logdir runs` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.training.artifacts.run_folder import FRAME
from weft.utils.files.file_writing import refuse_link


class TensorBoard:
    """Callback that writes loss, scores, learning rate and seconds of each epoch.

    Args:
        folder: Folder of the event files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def __call__(self, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        epoch = record["epoch"]
        if self._writer is None:
            refuse_link(self._folder)
            # In a resumed run, hide what the stopped one wrote after its checkpoint.
            self._writer = SummaryWriter(self._folder, purge_step=epoch)
        for name in record.keys() - {*FRAME, "epoch"}:
            self._writer.add_scalar(name, record[name], epoch)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
