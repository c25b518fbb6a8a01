"""Two runs with the same seed have equal records, except for measured values, and equal weights, bit for bit."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.campaign.scene import Scene, check, lines, measured
from tests.campaign.settings import draw_placement, draw_setting

EPOCHS = 6
COUNTED = ("bytes_sent", "bytes_received")
ORIGIN = ("date", "command")
"""Fields of the record that differ between two runs: the command names the folder."""


def attempt(random: Random, scene: Scene) -> None:
    """Compare two runs, without `--measure`: with it, plans may differ, and therefore rounding."""
    setting, placement = draw_setting(random, scene.stage.typed), draw_placement(random)
    flags = [flag for flag in placement.flags if flag != "--measure"]
    run = (*setting.train(), *flags, "--epochs", EPOCHS)
    folders = [scene.folder / name for name in ("one", "other")]
    for folder in folders:
        scene.run(*run, "--out", folder).check_ended(0)
    records = [[repeatable(line) for line in lines(folder)] for folder in folders]
    check(len(records[0]) > EPOCHS, "there are no records")
    check(len(records[0]) == len(records[1]), f"{len(records[0])} and {len(records[1])} lines")
    for number, pair in enumerate(zip(*records, strict=True), start=1):
        for name in sorted({*pair[0], *pair[1]}):
            values = [json.dumps(line.get(name)) for line in pair]
            message = f"line {number} ({pair[0]['kind']}): {name} is {values[0][:100]} and {values[1][:100]}"
            check(values[0] == values[1], message)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    check(weights[0] == weights[1], "the weights differ")


def repeatable(value: Any) -> Any:
    """Return a line of the record without measured values. Bytes sent and received are counted, and stay.

    Reports are removed as well: they contain times, whose number of digits changes the number of bytes.
    """
    if isinstance(value, list):
        return [repeatable(item) for item in value]
    if not isinstance(value, dict):
        return value
    left_out = {"report", *ORIGIN}
    names = [name for name in value if name in COUNTED or not (measured(name) or name in left_out)]
    return {name: repeatable(value[name]) for name in names}
