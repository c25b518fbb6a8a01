"""Bad flags and values are refused at once in one line, with exit code 2, and no folder is created."""

from __future__ import annotations

import dataclasses
import resource
from random import Random
from typing import Any

from tests.campaign.scene import Done, Scene, check, losses
from tests.campaign.settings import SMALL
from weft.cli.data import DATA_OPTIONS
from weft.config.config import Config, PartitionOptions
from weft.training.flag_checks import CHOICE_FLAGS, strategies_with

SECONDS = 20.0
MEMORY_BYTES = 12 << 30
"""Limit of the address space, of which a forked process already uses several GB."""
AMOUNTS = ("device_memory", "cache_memory")
NAMES = ("model", "strategy", "partition", "loss", "metrics", "optimizer", "scheduler")
PATHS = ("scratch", "machine", "choices")
"""Text fields that name paths; `NAMES` and `AMOUNTS` are those of names and amounts of memory."""
NO_NUMBERS = ("", " ", "x", "1e", "--", "0x10", "1,5", "1 2", "one", "None", "True", "\u00bd", "\u216b", "[1]", "\x07")
NO_WHOLE_NUMBERS = ("1.5", "nan", "inf", "-inf", "1e3", "1e400")
NO_AMOUNTS = ("much", "-5MB", "nan", "inf", "1QB", "1e3", "0x10", "MB", "5 5", "1..5GB", " ", "\u0663\u0663XB")
NO_NAMES = ("x", "tensors", "GCN ", "gcn,sage", "\u0663", "no/such", "..", " ")
HUGE = (10**6, 2**31, 2**63 - 1, 2**64, 10**30)
STRANGE_NUMBERS = ("\u0663", "1_0", " 2", "+2", "02", "2 ")
"""Numbers that Python accepts in unusual form: they must be refused, or read as Python reads them."""
ENDLESS = ("epochs",)
"""Fields in which a huge number is legal and makes a run endless."""


def attempt(random: Random, scene: Scene) -> None:
    """Make one mistake in an otherwise correct command. Some kinds must be refused, others may also work."""
    kinds = (bad_value, bad_value, bad_value, huge_value, strange_value, unknown_flag, shortened_flag, repeated_flag)
    random.choice(kinds)(random, scene)


def commands(random: Random) -> tuple[list[str], type[Config | PartitionOptions], list[str]]:
    """Return a correct command to which a flag is added, the schema of that flag, and the names of its fields."""
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
    """Give a field an illegal value."""
    words, schema, names = commands(random)
    name = random.choice(names)
    (spec,) = (spec for spec in dataclasses.fields(schema) if spec.name == name)
    values = bad_values(spec)
    if not values:
        return bad_value(random, scene)
    refused(scene, [*words, *needed(random, words[0], name), f"{flag(name)}={random.choice(values)}"])
    return None


def bad_values(spec: dataclasses.Field[Any]) -> list[str]:
    """Return values that a field refuses whatever the other fields are, if there are any."""
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
    values = list(NO_NUMBERS) + (list(NO_WHOLE_NUMBERS) if kind is int else ["nan", "inf", "-inf", "1e400", "NaN"])
    if limits["least"] is not None:
        step = 1 if kind is int else 0.5
        values += [str(limits["least"] - step), str(-(10**30)), "-1e300" if kind is float else "-9"]
    if limits["below"] is not None:
        values += [str(limits["below"]), str(limits["below"] * 10)]
    if limits["most"] is not None:
        values += [str(limits["most"] * 2 + 0.5), "1e300"]
    return values


def needed(random: Random, command: str, name: str) -> list[str]:
    """Return flags without which a field would be refused for another reason."""
    if name in CHOICE_FLAGS:
        kind, having = CHOICE_FLAGS[name]
        return [f"--{kind}", random.choice(having)]
    owners = strategies_with(name)
    return ["--strategy", random.choice(owners)] if owners and command == "train" else []


def huge_value(random: Random, scene: Scene) -> None:
    """Give a field a huge number, which is refused, runs out of memory in one line, or has no effect."""
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
    """Give a field a number in unusual form."""
    words, schema, names = commands(random)
    numbers = [
        spec.name for spec in dataclasses.fields(schema) if spec.name in names and type(spec.default) in (int, float)
    ]
    name = random.choice(numbers)
    tolerated(scene, [*words, *needed(random, words[0], name), flag(name), random.choice(STRANGE_NUMBERS)])


def unknown_flag(random: Random, scene: Scene) -> None:
    """Use an unknown flag: a real one with a changed name or other dashes."""
    words, _, names = commands(random)
    name = flag(random.choice(names))
    wrong = (name + "s", name.replace("-", "_", 3), "-" + name, name[:3] + "x" + name[3:], name[1:])
    refused(scene, [*words, random.choice(wrong), "1"])


def shortened_flag(random: Random, scene: Scene) -> None:
    """Use an abbreviated flag, which is refused or read as the full one."""
    words, _, names = commands(random)
    name = flag(random.choice(names))
    short = name[: random.randint(3, max(3, len(name) - 1))]
    tolerated(scene, [*words, short, random.choice(("1", "2", "x", "none"))])


def repeated_flag(random: Random, scene: Scene) -> None:
    """Use a flag twice, with a number and with a value that is not a number."""
    words, schema, names = commands(random)
    numbers = [
        spec.name for spec in dataclasses.fields(schema) if spec.name in names and type(spec.default) in (int, float)
    ]
    name = random.choice(numbers)
    pair = [[flag(name), "1"], [flag(name), "x"]]
    random.shuffle(pair)
    refused(scene, [*words, *pair[0], *pair[1]])


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def limit_memory() -> None:
    """Limit the memory of this process, to protect other processes on the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def run(scene: Scene, words: list[str]) -> Done:
    """Run a command with the time limit of a refusal."""
    return scene.run(*words, seconds=SECONDS, prepare=limit_memory)


def refused(scene: Scene, words: list[str]) -> None:
    """Check that a command is refused and creates no file."""
    run(scene, words).check_refused()
    check_no_files(scene)


def tolerated(scene: Scene, words: list[str]) -> None:
    """Check that a command succeeds, or fails with one line and leaves no folder unless its run had started."""
    done = run(scene, words)
    done.check_ended(0, 1, 2)
    if done.code:
        out = scene.working_folder / "out"
        if out.is_dir() and (out / "metrics.jsonl").exists():
            check(bool(losses(out)), "a refused run has left a folder without an epoch")
        else:
            check_no_files(scene)


def check_no_files(scene: Scene) -> None:
    """Check that the command's working folder is empty."""
    left = [str(path.relative_to(scene.working_folder)) for path in scene.working_folder.rglob("*")]
    check(not left, f"a refused command has left {left}")
