"""Bad flags and values: one line, exit code 2, at once, and no folder."""

from __future__ import annotations

import dataclasses
import resource
from random import Random
from typing import Any

from tests.campaign.scene import Done, Scene, losses, require
from tests.campaign.settings import SMALL
from weft.cli.data import DATA_OPTIONS
from weft.config.config import Config, PartitionOptions
from weft.training.flag_checks import CHOICE_FLAGS, strategies_with

SECONDS = 20.0
MEMORY_BYTES = 12 << 30
"""Of addresses, which a forked process has several GB of to begin with."""
AMOUNTS = ("device_memory", "cache_memory")
NAMES = ("model", "strategy", "partition", "loss", "metrics", "optimizer", "scheduler")
PATHS = ("scratch", "machine", "choices")
"""Fields that are text, by what they name."""
NO_NUMBERS = ("", " ", "x", "1e", "--", "0x10", "1,5", "1 2", "one", "None", "True", "\u00bd", "\u216b", "[1]", "\x07")
NO_WHOLE_NUMBERS = ("1.5", "nan", "inf", "-inf", "1e3", "1e400")
NO_AMOUNTS = ("much", "-5MB", "nan", "inf", "1QB", "1e3", "0x10", "MB", "5 5", "1..5GB", " ", "\u0663\u0663XB")
NO_NAMES = ("x", "tensors", "GCN ", "gcn,sage", "\u0663", "no/such", "..", " ")
HUGE = (10**6, 2**31, 2**63 - 1, 2**64, 10**30)
STRANGE_NUMBERS = ("\u0663", "1_0", " 2", "+2", "02", "2 ")
"""Which Python takes as numbers: refused, or taken as these."""
ENDLESS = ("epochs",)
"""Where a huge number is a run without an end, as asked for."""


def attempt(random: Random, scene: Scene) -> None:
    """One mistake in a command that is right otherwise; the kinds that may be none must not be more than a refusal."""
    kinds = (bad_value, bad_value, bad_value, huge_value, strange_value, unknown_flag, shortened_flag, repeated_flag)
    random.choice(kinds)(random, scene)


def commands(random: Random) -> tuple[list[str], type[Config | PartitionOptions], list[str]]:
    """A command that is right but for a flag to come, whose fields that flag is of, and their names."""
    out = ["--out", "out"]
    every = [spec.name for spec in dataclasses.fields(Config) if spec.name not in ("graph", "device")]
    trained = ["--epochs", "1", "--hidden", "4"]
    kind = random.choice(("train", "train", "train", "compare", "partition", "import"))
    if kind == "train":
        return ["train", SMALL, *trained, *out], Config, every
    if kind == "compare":
        names = [name for name in every if name != "strategy"]
        return ["compare", SMALL, "--strategies", "single,tensor", *trained, *out], Config, names
    if kind == "partition":
        names = [spec.name for spec in dataclasses.fields(PartitionOptions)]
        return ["partition", SMALL, "--parts", "2", "--method", "fennel", *out], PartitionOptions, names
    return ["data", "import", SMALL, *out], Config, list(DATA_OPTIONS)


def bad_value(random: Random, scene: Scene) -> None:
    """A value that the field does not take."""
    words, schema, names = commands(random)
    name = random.choice(names)
    (spec,) = (spec for spec in dataclasses.fields(schema) if spec.name == name)
    values = bad_values(spec)
    if not values:
        return bad_value(random, scene)
    refused(scene, [*words, *needed(random, words[0], name), f"{flag(name)}={random.choice(values)}"])
    return None


def bad_values(spec: dataclasses.Field[Any]) -> list[str]:
    """Values that a field refuses whatever the others are; none where there are none."""
    kind: Any = type(spec.default)
    limits = spec.metadata
    if kind is bool:
        return ["1", "true", ""]
    if kind is str:
        if limits["choices"] or limits["several"]:
            return [value for value in NO_NAMES if value.strip()] + [value for value in ("",) if limits["choices"]]
        if spec.name in AMOUNTS:
            return list(NO_AMOUNTS)
        return list(NO_NAMES) if spec.name in NAMES else ["no/such", "x"] if spec.name in PATHS else []
    found = list(NO_NUMBERS) + (list(NO_WHOLE_NUMBERS) if kind is int else ["nan", "inf", "-inf", "1e400", "NaN"])
    if limits["least"] is not None:
        step = 1 if kind is int else 0.5
        found += [str(limits["least"] - step), str(-(10**30)), "-1e300" if kind is float else "-9"]
    if limits["below"] is not None:
        found += [str(limits["below"]), str(limits["below"] * 10)]
    if limits["most"] is not None:
        found += [str(limits["most"] * 2 + 0.5), "1e300"]
    return found


def needed(random: Random, command: str, name: str) -> list[str]:
    """Flags without which a field is refused for another reason."""
    if name in CHOICE_FLAGS:
        kind, having = CHOICE_FLAGS[name]
        return [f"--{kind}", random.choice(having)]
    owners = strategies_with(name)
    return ["--strategy", random.choice(owners)] if owners and command == "train" else []


def huge_value(random: Random, scene: Scene) -> None:
    """A number beyond all use: refused, out of memory in one line, or of no effect."""
    words, schema, names = commands(random)
    numbers = [
        spec
        for spec in dataclasses.fields(schema)
        if spec.name in names and type(spec.default) in (int, float) and spec.name not in ENDLESS
    ]
    spec = random.choice(numbers)
    value = str(random.choice(HUGE)) if type(spec.default) is int else random.choice(("1e300", "1e30", "1e18", "1e9"))
    if spec.name == "workers" and int(value) < 2**31:
        value = str(2**31)  # a million processes might be started
    strategy = ["--strategy", "tensor"] if spec.name == "workers" and words[0] == "train" else []
    tolerated(scene, [*words, *needed(random, words[0], spec.name), *strategy, flag(spec.name), value])


def strange_value(random: Random, scene: Scene) -> None:
    """A number in other digits."""
    words, schema, names = commands(random)
    numbers = [
        spec.name for spec in dataclasses.fields(schema) if spec.name in names and type(spec.default) in (int, float)
    ]
    name = random.choice(numbers)
    tolerated(scene, [*words, *needed(random, words[0], name), flag(name), random.choice(STRANGE_NUMBERS)])


def unknown_flag(random: Random, scene: Scene) -> None:
    """A flag that there is not, in its name, its place or its dashes."""
    words, _, names = commands(random)
    name = flag(random.choice(names))
    wrong = (name + "s", name.replace("-", "_", 3), "-" + name, name[:3] + "x" + name[3:], name[1:])
    refused(scene, [*words, random.choice(wrong), "1"])


def shortened_flag(random: Random, scene: Scene) -> None:
    """The beginning of a flag's name: refused, or what it stands for."""
    words, _, names = commands(random)
    name = flag(random.choice(names))
    short = name[: random.randint(3, max(3, len(name) - 1))]
    tolerated(scene, [*words, short, random.choice(("1", "2", "x", "none"))])


def repeated_flag(random: Random, scene: Scene) -> None:
    """A flag twice, with a good value and with one that is no number."""
    words, schema, names = commands(random)
    numbers = [
        spec.name for spec in dataclasses.fields(schema) if spec.name in names and type(spec.default) in (int, float)
    ]
    name = random.choice(numbers)
    pair = [[flag(name), "1"], [flag(name), "x"]]
    random.shuffle(pair)
    refused(scene, [*words, *pair[0], *pair[1]])


def flag(name: str) -> str:
    """A field's."""
    return "--" + name.replace("_", "-")


def limit_memory() -> None:
    """So that nobody else on the machine runs out of it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def run(scene: Scene, words: list[str]) -> Done:
    """A command, in the seconds that a refusal may take."""
    return scene.run(*words, seconds=SECONDS, prepare=limit_memory)


def refused(scene: Scene, words: list[str]) -> None:
    """Broken, unless a command is refused and leaves nothing."""
    run(scene, words).require_refused()
    require_nothing_here(scene)


def tolerated(scene: Scene, words: list[str]) -> None:
    """Broken, unless a command is done, or says in one line why not, and leaves no folder if its run had not begun."""
    done = run(scene, words)
    done.require_ended(0, 1, 2)
    if done.code:
        out = scene.here / "out"
        if out.is_dir() and (out / "metrics.jsonl").exists():
            require(bool(losses(out)), "a refused run has left a folder without an epoch")
        else:
            require_nothing_here(scene)


def require_nothing_here(scene: Scene) -> None:
    """Broken if there is anything where the command was."""
    left = [str(path.relative_to(scene.here)) for path in scene.here.rglob("*")]
    require(not left, f"a refused command has left {left}")
