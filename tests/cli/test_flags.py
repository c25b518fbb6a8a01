"""Each strategy accepts the flags of its options and refuses others, as docs/flags.md says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import weft
from weft.cli.main import main
from weft.config.config import Config
from weft.config.optimisations import OPTIMISATIONS
from weft.strategies import STRATEGIES, VertexOptions, get_strategy
from weft.strategies.single import SinglePlan
from weft.training.flag_checks import (
    CHOICE_FLAGS,
    make_options,
    refuse_foreign_flags,
    strategies_with,
    strategies_with_optimisation,
    without_foreign_flags,
)
from weft.utils.errors import InputError

OTHER = {
    "partition": "metis",
    "batch_size": "all",
    "accumulate_grad_batches": 2,
    "fanout": "15,10",
    "sampling": "labor",
    "batch_dependency": 4,
    "prefetch_batches": 0,
    "cache_ratio": 0.5,
    "cache_memory": "1MB",
    "machine": "machine.json",
    "measure": True,
    "refresh_every": 2,
    "staleness": 0.1,
    "device_memory": "1GB",
    "nn_device": "host",
    "chunks": 2,
    "intermediates": "keep",
    "scratch": "/tmp",
}
"""A value other than the default for each flag that only some strategies accept."""
BUILT_IN = [name for name, plan in STRATEGIES.items() if plan.__module__.startswith("weft.")]
"""Strategies of weft, without those that tests register, which have no flags."""
PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def strategy_specific_flags() -> list[str]:
    return [spec.name for spec in dataclasses.fields(Config) if strategies_with(spec.name)]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def table() -> str:
    """Return the table of docs/flags.md: a row for each flag and optimisation that only some strategies accept."""
    rows = [(flag(name), strategies_with(name)) for name in strategy_specific_flags()]
    rows += [
        (f"--disable {name}", strategies_with_optimisation(name))
        for name in OPTIMISATIONS
        if strategies_with_optimisation(name)
    ]
    lines = ["| flag | " + " | ".join(BUILT_IN) + " |", "|---|" + "---|" * len(BUILT_IN)]
    for name, owners in rows:
        cells = ("accepted" if strategy in owners else "refused" for strategy in BUILT_IN)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_every_owned_flag_is_tried() -> None:
    assert set(strategy_specific_flags()) == OTHER.keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OTHER)
def test_a_flag_is_accepted_or_refused(name: str, strategy: str) -> None:
    config = Config(strategy=strategy, **{name: OTHER[name]})  # type: ignore[arg-type]
    owners = strategies_with(name)
    if strategy in owners:
        refuse_foreign_flags(config)
        assert without_foreign_flags(config, strategy) == config
        return
    with pytest.raises(
        InputError, match=f"^{flag(name)} has no effect under strategy {strategy}: leave it out"
    ) as caught:
        refuse_foreign_flags(config)
    assert str(caught.value).endswith(f"give --strategy {' or '.join(owners)}")
    assert without_foreign_flags(config, strategy) == Config(strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OPTIMISATIONS)
def test_an_optimisation_is_accepted_or_refused(name: str, strategy: str) -> None:
    device = "cuda" if name == "capture" else "cpu"
    config, owners = Config(strategy=strategy, disable=name, device=device), strategies_with_optimisation(name)
    if owners and strategy not in owners:
        with pytest.raises(
            InputError, match=f"^--disable {name} has no effect under strategy {strategy}: leave it out"
        ):
            refuse_foreign_flags(config)
    else:
        refuse_foreign_flags(config)


def test_an_optimisation_of_gpus_is_refused_without_one() -> None:
    with pytest.raises(InputError, match=r"^--disable capture has no effect under device cpu: .* give --device cuda"):
        refuse_foreign_flags(Config(disable="capture"))


@pytest.mark.parametrize(("name", "value"), [("decoder", "distmult"), ("negatives", 3), ("eval_negatives", 3)])
def test_a_flag_of_another_task_is_refused(name: str, value: object) -> None:
    config = Config(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=f"^{flag(name)} has no effect under task node: .* give --task {CHOICE_FLAGS[name][1][0]}"
    ):
        refuse_foreign_flags(config)
    refuse_foreign_flags(dataclasses.replace(config, task="link"))


def test_one_of_several_strategies_is_enough() -> None:
    config = Config(chunks=3, refresh_every=2)
    refuse_foreign_flags(config, ("single", "tensor", "stale"))
    with pytest.raises(InputError, match="--refresh-every has no effect under strategy single and tensor"):
        refuse_foreign_flags(config, ("single", "tensor"))
    assert without_foreign_flags(config, "tensor") == Config(strategy="tensor", chunks=3)


@pytest.mark.parametrize("name", OTHER)
def test_help_names_the_strategies(name: str) -> None:
    (spec,) = (spec for spec in dataclasses.fields(Config) if spec.name == name)
    # Other tests may have imported benchmarks or examples that register strategies of their own.
    names = [owner for owner in strategies_with(name) if owner in BUILT_IN]
    assert spec.metadata["help"].startswith(", ".join(names) + ": ")


def test_the_page_contains_the_table() -> None:
    assert table() in PAGE.read_text(), f"write this table into {PAGE}:\n{table()}"


def test_options_are_fields_of_the_configuration() -> None:
    fields = {spec.name for spec in dataclasses.fields(Config)}
    for name in BUILT_IN:
        plan = get_strategy(name)
        options = {spec.name for spec in dataclasses.fields(plan.options_type)}
        assert options | set(plan.flags) <= fields
        assert not options & set(plan.flags)


def test_a_custom_option_keeps_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class MyOptions(VertexOptions):
        radius: int = 3

    class MyPlan(SinglePlan):
        name = "mine"
        options_type = MyOptions

    monkeypatch.setitem(STRATEGIES, "mine", MyPlan)
    assert make_options(Config(strategy="mine")) == MyOptions(radius=3)
    with pytest.raises(InputError, match="--chunks has no effect under strategy mine"):
        refuse_foreign_flags(Config(strategy="mine", chunks=2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--without", "reuse"), "--without is now --disable (see weft train --help)"),
        (("--bins=4",), "--bins is now --chunks (see weft train --help)"),
        (("--metric", "auc"), "--metric is now --metrics (see weft train --help)"),
        (("--strategy", "hybrid", "--probe", "x"), "--probe is now --machine (see weft train --help)"),
        (("--disable", "reuse,intra"), "--disable intra is now called prefetch"),
    ],
)
def test_a_former_name_is_refused_with_the_new_one(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", *flags]) == 2
    assert capsys.readouterr().err == f"weft: error: {message}\n"


def test_a_former_name_in_a_call_is_refused_with_the_new_one() -> None:
    with pytest.raises(InputError, match=r"^weft\.train: without is now called disable$"):
        weft.train("digits", without="reuse")
    with pytest.raises(InputError, match=r"^bins is now called chunks$"):
        weft.predict("run", bins=3)
