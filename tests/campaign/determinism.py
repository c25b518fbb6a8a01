"""Two runs with one seed: the same records but for what is measured, and the same weights, bit for bit."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.campaign.scene import Scene, lines, measured, require
from tests.campaign.settings import draw_placement, draw_setting

EPOCHS = 6
COUNTED = ("bytes_sent", "bytes_received")


def attempt(random: Random, scene: Scene) -> None:
    """Without `--measure`, by which the choices of two runs may differ, and then the last digits."""
    setting, placement = draw_setting(random, scene.stage.typed), draw_placement(random)
    flags = [one for one in placement.flags if one != "--measure"]
    run = (*setting.train(), *flags, "--epochs", EPOCHS)
    folders = [scene.folder / name for name in ("one", "other")]
    for folder in folders:
        scene.run(*run, "--out", folder).require_ended(0)
    records = [[repeatable(line) for line in lines(folder)] for folder in folders]
    require(len(records[0]) > EPOCHS, "there are no records")
    require(len(records[0]) == len(records[1]), f"{len(records[0])} and {len(records[1])} lines")
    for number, pair in enumerate(zip(*records, strict=True), start=1):
        for name in sorted({*pair[0], *pair[1]}):
            values = [json.dumps(line.get(name)) for line in pair]
            said = f"line {number} ({pair[0]['kind']}): {name} is {values[0][:100]} and {values[1][:100]}"
            require(values[0] == values[1], said)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    require(weights[0] == weights[1], "the weights differ")


def repeatable(value: Any) -> Any:
    """A line without what is measured; what was sent and received is counted, and stays.

    But for reports: they tell of seconds, and have as many bytes as these have digits.
    """
    if isinstance(value, list):
        return [repeatable(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = [name for name in value if name in COUNTED or not (measured(name) or name == "report")]
    return {name: repeatable(value[name]) for name in kept}
