"""How parameters are updated: the optimiser, its learning rate by epoch, clipped gradients, and their state."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from weft.comm import Group
from weft.config.config import Config
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, require_new_name
from weft.utils.errors import InputError, unknown

Parameters = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Config, Parameters], torch.optim.Optimizer]] = {
    "adam": lambda config, given: torch.optim.Adam(given, lr=config.lr, weight_decay=config.weight_decay),
    "adamw": lambda config, given: torch.optim.AdamW(given, lr=config.lr, weight_decay=config.weight_decay),
    "sgd": lambda config, given: torch.optim.SGD(
        given, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    ),
    "rmsprop": lambda config, given: torch.optim.RMSprop(
        given, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    ),
}
OPTIMIZER_FLAGS = ("lr", "weight_decay", "momentum")
"""Fields that an optimiser of one's own does not read."""

RATES: dict[str, Callable[[Config, int], float]] = {
    "none": lambda *_: 1.0,
    "step": lambda config, epoch: config.lr_factor ** (epoch // config.scheduler_epochs),
    "cosine": lambda config, epoch: (
        (1 + math.cos(math.pi * min(epoch / max(config.scheduler_epochs - config.warmup_epochs, 1), 1.0))) / 2
    ),
}
"""The share of the learning rate in an epoch, counted from the end of the warm-up."""
SCHEDULERS = (*RATES, "plateau")
SCHEDULER_FLAGS = ("scheduler_epochs", "lr_factor", "warmup_epochs")
"""Fields that a schedule of one's own does not read."""

CLIP_MARGIN = 1e-6
"""Added to the norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""


def make_optimizer(config: Config, parameters: Parameters, own: OwnFunctions = NO_FUNCTIONS) -> torch.optim.Optimizer:
    """The optimiser of a model's parameters. InputError for a name that is unknown, or a function that makes none."""
    if own.optimizer is None:
        if config.optimizer not in OPTIMIZERS:
            raise unknown("--optimizer", config.optimizer, OPTIMIZERS)
        return OPTIMIZERS[config.optimizer](config, parameters)
    require_new_name("optimizer", config.optimizer, OPTIMIZERS)
    made = own.optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(
            f"optimizer {config.optimizer} gives {type(made).__name__}: return a torch.optim.Optimizer of the "
            "parameters that it is given"
        )
    require_plain(f"optimizer {config.optimizer}", plain_groups(made))
    return made


def make_scheduler(
    config: Config, optimizer: torch.optim.Optimizer, own: OwnFunctions = NO_FUNCTIONS, *, lower_is_better: bool = False
) -> LRScheduler | None:
    """What changes the optimiser's learning rate after an epoch; None: nothing does.

    lower_is_better: of the validation score, which `plateau` goes by.
    InputError for an unknown name, or a function that makes none, or one whose state no checkpoint can hold.
    """
    if own.scheduler is not None:
        require_new_name("scheduler", config.scheduler, dict.fromkeys(SCHEDULERS))
        made = own.scheduler(optimizer)
        if not isinstance(made, LRScheduler):
            raise InputError(
                f"scheduler {config.scheduler} gives {type(made).__name__}: return a torch.optim.lr_scheduler "
                "LRScheduler of the optimizer that it is given"
            )
        require_plain(f"scheduler {config.scheduler}", made.state_dict())
        return made
    if config.scheduler not in SCHEDULERS:
        raise unknown("--scheduler", config.scheduler, SCHEDULERS)
    if config.scheduler == "plateau":
        patience = config.scheduler_epochs - 1
        mode: Literal["min", "max"] = "min" if lower_is_better else "max"
        return ReduceLROnPlateau(optimizer, mode, config.lr_factor, patience, threshold=0.0, eps=0.0)
    if config.scheduler == "none" and not config.warmup_epochs:
        return None
    return LambdaLR(optimizer, lambda epoch: rate_factor(config, epoch))


def rate_factor(config: Config, epoch: int) -> float:
    """The share of --lr in an epoch: rising evenly over the warm-up, then as the schedule says."""
    warming = config.warmup_epochs
    return (epoch + 1) / (warming + 1) if epoch < warming else RATES[config.scheduler](config, epoch - warming)


def advance(scheduler: LRScheduler | None, score: float | None) -> None:
    """The end of an epoch. score: that of validation, where the epoch has one; without it, a plateau waits."""
    if isinstance(scheduler, ReduceLROnPlateau):
        if score is not None:
            scheduler.step(score)
    elif scheduler is not None:
        scheduler.step()


def clip(parameters: Parameters, own_rows: set[nn.Parameter], group: Group, most: float) -> float:
    """Scales all gradients down where their norm, over the whole model, is more than `most`; the norm before.

    own_rows: the parameters of which each rank has rows of its own; the others, and their gradients, are the same on
    all ranks. All ranks call it.
    """
    shared, apart = (
        [one.grad for one in parameters if one.grad is not None and (one in own_rows) is own] for own in (False, True)
    )
    square = group.all_reduce(squared_norm(apart, group.device), tag="norm") if own_rows else torch.zeros(())
    norm = math.sqrt(square.item() + squared_norm(shared, group.device).item())
    if norm > most:
        for grad in (*shared, *apart):
            grad.mul_(most / (norm + CLIP_MARGIN))
    return norm


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares: float64 []."""
    squares = [tensor.double().square().sum().to(device) for tensor in tensors]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


def numbered_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters in the order in which their states are numbered."""
    return [parameter for options in optimizer.param_groups for parameter in options["params"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimiser's state by parameter number and name."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of an optimiser's groups of parameters, among them the learning rates."""
    groups = optimizer.state_dict()["param_groups"]
    return [{name: value for name, value in options.items() if name != "params"} for options in groups]


def plain_state(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """What JSON holds of an optimiser and a schedule. InputError where they have what it does not."""
    values = {
        str(number): {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for number, values in optimizer.state_dict()["state"].items()
    }
    state = {"groups": plain_groups(optimizer), "values": {number: some for number, some in values.items() if some}}
    require_plain(f"optimizer {type(optimizer).__name__}", state)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
        require_plain(f"scheduler {type(scheduler).__name__}", state["scheduler"])
    return state


def load_updates(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Gives an optimiser and a schedule the state that others had: `optimizer_tensors` and `plain_state`.

    InputError where these were of another kind. Where no groups are kept, theirs stay as they were made.
    """
    known = optimizer.state_dict()
    try:
        state: dict[int, dict[str, Any]] = {int(number): dict(some) for number, some in plain["values"].items()}
        for key, value in tensors.items():
            number, name = key.split(".", 1)
            state.setdefault(int(number), {})[name] = value
        groups = restore_types(known["param_groups"], plain["groups"] or known["param_groups"])
        kept = [
            {**options, "params": one["params"]} for options, one in zip(groups, known["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": kept})
        parameters = numbered_parameters(optimizer)
        for place, some in state.items():
            loaded = optimizer.state[parameters[place]]
            tensors = {name: value for name, value in some.items() if isinstance(value, Tensor)}
            loaded |= {name: value.to(loaded[name].device) for name, value in tensors.items()}  # in the type it had
        if scheduler is not None:
            scheduler.load_state_dict(restore_types(scheduler.state_dict(), plain["scheduler"]))
    except (ValueError, KeyError) as error:
        raise InputError(
            f"--resume: the checkpoint is of another optimizer or scheduler ({error}): give those of the run"
        ) from error


def require_plain(what: str, state: Any) -> None:
    """InputError unless a state comes back from JSON as it was: nothing in a checkpoint is unpickled."""
    try:
        same = restore_types(state, json.loads(json.dumps(state))) == state
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the {what} has a state that JSON does not hold ({error}): keep numbers, lists and texts"
        ) from error
    if not same:
        raise InputError(f"the {what} has a state that JSON does not give back: keep numbers, lists and texts in it")


def restore_types(known: Any, plain: Any) -> Any:
    """A value that comes from JSON, in the types of a known one: its tuples, and its mappings by numbers."""
    if isinstance(known, tuple):
        return tuple(plain)
    if isinstance(known, list) and len(known) == len(plain):
        return [restore_types(one, other) for one, other in zip(known, plain, strict=True)]
    if isinstance(known, dict):
        keys = {str(key): key for key in known}
        made = copy.copy(known)
        made.clear()
        made.update(
            {keys.get(key, key): restore_types(known.get(keys.get(key)), value) for key, value in plain.items()}
        )
        return made
    return plain
