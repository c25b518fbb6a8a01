"""Parameter updates: optimizer, learning-rate schedule, gradient clipping, and their state in checkpoints."""

from __future__ import annotations

import copy
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from weft.comm import Group
from weft.config.config import TrainingOptions
from weft.training.custom_functions import NO_FUNCTIONS, OwnFunctions, require_new_name
from weft.utils.errors import InputError, cause, unknown

Parameters = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[TrainingOptions, Parameters], torch.optim.Optimizer]] = {
    "adam": lambda config, parameters: torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay),
    "adamw": lambda config, parameters: torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay),
    "sgd": lambda config, parameters: torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    ),
    "rmsprop": lambda config, parameters: torch.optim.RMSprop(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    ),
}
"""Built-in optimizers by name, each a function of the configuration and the parameters."""
OPTIMIZER_FLAGS = ("lr", "weight_decay", "momentum")
"""Fields of Config that a user-defined optimizer does not read."""

RATES: dict[str, Callable[[TrainingOptions, int], float]] = {
    "none": lambda *_: 1.0,
    "step": lambda config, epoch: config.lr_factor ** (epoch // config.scheduler_epochs),
    "cosine": lambda config, epoch: (
        (1 + math.cos(math.pi * min(epoch / max(config.scheduler_epochs - config.warmup_epochs, 1), 1.0))) / 2
    ),
}
"""Learning-rate schedules by name: factor of --lr in an epoch, which is counted from the end of the warm-up."""
SCHEDULERS = (*RATES, "plateau")
"""Names of the built-in learning-rate schedules. "plateau" depends on the validation score, not on the epoch."""
SCHEDULER_FLAGS = ("scheduler_epochs", "lr_factor", "warmup_epochs")
"""Fields of Config that a user-defined scheduler does not read."""

CLIP_MARGIN = 1e-6
"""Number added to the gradient norm before the division, as in torch.nn.utils.clip_grad_norm_."""


def make_optimizer(
    config: TrainingOptions, parameters: Parameters, functions: OwnFunctions = NO_FUNCTIONS
) -> torch.optim.Optimizer:
    """Return the optimizer of a run.

    Args:
        config: Options of the optimizer and the schedule.
        parameters: Parameters of the model.
        functions: User-defined functions of the run.

    Raises:
        InputError: The name is unknown, the user-defined function returns no optimizer or one that needs a closure, or
            JSON cannot represent its state.
    """
    if functions.optimizer is None:
        if config.optimizer not in OPTIMIZERS:
            raise unknown("--optimizer", config.optimizer, OPTIMIZERS)
        return OPTIMIZERS[config.optimizer](config, parameters)
    require_new_name("optimizer", config.optimizer, OPTIMIZERS)
    optimizer = functions.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer {config.optimizer} returns a {type(optimizer).__name__}: return a torch.optim.Optimizer of "
            "the parameters that it receives"
        )
    required = [
        name
        for name, parameter in inspect.signature(optimizer.step).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required:
        raise InputError(
            f"optimizer {config.optimizer}: {type(optimizer).__name__}.step needs a {' and a '.join(required)}, but "
            "weft computes the gradients once and calls step(): choose an optimizer whose step needs no argument, such "
            "as Adam"
        )
    require_plain(f"optimizer {config.optimizer}", plain_groups(optimizer))
    return optimizer


def make_scheduler(
    config: TrainingOptions,
    optimizer: torch.optim.Optimizer,
    functions: OwnFunctions = NO_FUNCTIONS,
    *,
    lower_is_better: bool = False,
) -> LRScheduler | None:
    """Return the learning-rate scheduler of a run, which is stepped after each epoch; None if the rate is constant.

    Args:
        config: Options of the optimizer and the schedule.
        optimizer: The optimizer whose learning rate is scheduled.
        functions: User-defined functions of the run.
        lower_is_better: True if a lower validation score is better, for `plateau`.

    Raises:
        InputError: The name is unknown, the user-defined function returns no scheduler, or JSON cannot represent its
            state.
    """
    if functions.scheduler is not None:
        require_new_name("scheduler", config.scheduler, dict.fromkeys(SCHEDULERS))
        scheduler = functions.scheduler(optimizer)
        if not isinstance(scheduler, LRScheduler):
            raise InputError(
                f"scheduler {config.scheduler} returns a {type(scheduler).__name__}: return a "
                "torch.optim.lr_scheduler.LRScheduler of the optimizer that it receives"
            )
        require_plain(f"scheduler {config.scheduler}", scheduler.state_dict())
        return scheduler
    if config.scheduler not in SCHEDULERS:
        raise unknown("--scheduler", config.scheduler, SCHEDULERS)
    if config.scheduler == "plateau":
        patience = config.scheduler_epochs - 1
        mode: Literal["min", "max"] = "min" if lower_is_better else "max"
        return ReduceLROnPlateau(optimizer, mode, config.lr_factor, patience, threshold=0.0, eps=0.0)
    if config.scheduler == "none" and not config.warmup_epochs:
        return None
    return LambdaLR(optimizer, lambda epoch: rate_factor(config, epoch))


def rate_factor(config: TrainingOptions, epoch: int) -> float:
    """Return the factor of --lr in an epoch: linear during the warm-up, then according to the schedule.

    Args:
        config: Options of the optimizer and the schedule.
        epoch: Number of the epoch, from 0.
    """
    # During the warm-up, the factor rises linearly and reaches 1 in the first epoch after it.
    warmup = config.warmup_epochs
    return (epoch + 1) / (warmup + 1) if epoch < warmup else RATES[config.scheduler](config, epoch - warmup)


def check_scheduler(
    config: TrainingOptions,
    optimizer: torch.optim.Optimizer,
    functions: OwnFunctions,
    *,
    lower_is_better: bool,
    has_validation: bool,
) -> None:
    """Check before a run that its scheduler can be created and stepped after every epoch.

    Args:
        config: Options of the optimizer and the schedule.
        optimizer: An optimizer that the run does not use. Its learning rates change.
        functions: User-defined functions of the run.
        lower_is_better: True if a lower validation score is better.
        has_validation: True if there is a validation score.

    Raises:
        InputError: It cannot be created, its steps end before the last epoch, or it is a ReduceLROnPlateau that needs
            a validation score which does not exist, or which is better if it is lower.
    """
    name = f"--scheduler {config.scheduler}"
    scheduler = make_scheduler(config, optimizer, functions, lower_is_better=lower_is_better)
    if isinstance(scheduler, ReduceLROnPlateau):
        if reads_loss(scheduler, lower_is_better=lower_is_better):
            return
        if not has_validation:
            raise InputError(f"{name} needs a validation score, but there is no validation data: choose another")
        if lower_is_better and scheduler.mode == "max":
            raise InputError(f'{name} has mode="max", but a lower validation score is better: give mode="min"')
    elif functions.scheduler is not None and scheduler is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer makes no steps
            for epoch in range(1, config.epochs + 1):
                try:
                    scheduler.step()
                except Exception as error:
                    raise InputError(
                        f"{name} fails at the end of epoch {epoch} ({cause(error)}), but weft steps it at the end of "
                        f"each of the {config.epochs} epochs: make it for {config.epochs} steps"
                    ) from error


def reads_loss(scheduler: LRScheduler | None, *, lower_is_better: bool) -> bool:
    """Return True if a scheduler is a ReduceLROnPlateau whose mode is "min" although a higher score is better.

    Args:
        scheduler: The scheduler.
        lower_is_better: True if a lower validation score is better.
    """
    return isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode == "min" and not lower_is_better


def advance(scheduler: LRScheduler | None, loss: float, score: float | None, *, lower_is_better: bool) -> None:
    """Step the scheduler at the end of an epoch.

    A ReduceLROnPlateau follows the validation score, or the training loss if its mode is "min" and a higher score is
    better.

    Args:
        scheduler: The scheduler, or None for a constant learning rate.
        loss: Training loss of the epoch.
        score: Validation score of the epoch; None if no evaluation was due.
        lower_is_better: True if a lower validation score is better.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        value = loss if reads_loss(scheduler, lower_is_better=lower_is_better) else score
        if value is not None:
            scheduler.step(value)
    elif scheduler is not None:
        scheduler.step()


@contextmanager
def added_to_gradients(parameters: Parameters) -> Iterator[None]:
    """Add the gradients that the with block computes to those that the parameters have, unless it raises an error.

    At the start of the block, no parameter has a gradient.

    Args:
        parameters: All parameters of the model.
    """
    previous = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter in parameters:
            parameter.grad = None
        raise
    finally:
        for parameter, previous_grad in zip(parameters, previous, strict=True):
            if previous_grad is not None:
                parameter.grad = previous_grad if parameter.grad is None else previous_grad.add_(parameter.grad)


def clip(parameters: Parameters, sharded_parameters: set[nn.Parameter], group: Group, max_norm: float) -> float:
    """Scale all gradients down if their L2 norm over the whole model exceeds `max_norm`. All ranks must call it.

    Args:
        parameters: All parameters of the model.
        sharded_parameters: Parameters (embeddings) of which each rank has other rows. All other parameters and their
            gradients are equal on all ranks, so they count once.
        group: The ranks.
        max_norm: Largest norm to allow.

    Returns:
        The norm before scaling.
    """
    shared, sharded = (
        [
            parameter.grad
            for parameter in parameters
            if parameter.grad is not None and (parameter in sharded_parameters) is is_sharded
        ]
        for is_sharded in (False, True)
    )
    square = (
        group.all_reduce(squared_norm(sharded, group.device), tag="norm") if sharded_parameters else torch.zeros(())
    )
    norm = math.sqrt(square.item() + squared_norm(shared, group.device).item())
    if norm > max_norm:
        for grad in (*shared, *sharded):
            grad.mul_(max_norm / (norm + CLIP_MARGIN))
    return norm


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, float64 [].

    Args:
        tensors: The tensors.
        device: Device of the result.
    """
    squares = [tensor.double().square().sum().to(device) for tensor in tensors]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


def numbered_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order in which the optimizer's state_dict numbers them."""
    return [parameter for options in optimizer.param_groups for parameter in options["params"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by "NUMBER.NAME": number of the parameter, and name of the value."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's parameter groups, such as the learning rates, without the parameters."""
    groups = optimizer.state_dict()["param_groups"]
    return [{name: value for name, value in options.items() if name != "params"} for options in groups]


def plain_state(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """Return the state of optimizer and scheduler that is not in tensors, as JSON values.

    Args:
        optimizer: The optimizer.
        scheduler: The scheduler, if there is one.

    Raises:
        InputError: The state contains values that JSON cannot represent.
    """
    values = {
        str(number): {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for number, values in optimizer.state_dict()["state"].items()
    }
    state = {
        "groups": plain_groups(optimizer),
        "values": {number: of_parameter for number, of_parameter in values.items() if of_parameter},
    }
    require_plain(f"optimizer {type(optimizer).__name__}", state)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
        require_plain(f"scheduler {type(scheduler).__name__}", state["scheduler"])
    return state


def load_updates(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    tensors: Mapping[str, Tensor],
    json_state: Mapping[str, Any],
) -> None:
    """Load a saved state into an optimizer and a scheduler.

    Args:
        optimizer: The optimizer to load into.
        scheduler: The scheduler to load into, if there is one.
        tensors: Tensors of the state, from `optimizer_tensors`.
        json_state: The rest of the state, from `plain_state`. Without groups, the groups of `optimizer` remain as
            created.

    Raises:
        InputError: The state belongs to another kind of optimizer or scheduler.
    """
    current = optimizer.state_dict()
    try:
        state: dict[int, dict[str, Any]] = {
            int(index): dict(of_parameter) for index, of_parameter in json_state["values"].items()
        }
        for key, value in tensors.items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = value
        groups = restore_types(current["param_groups"], json_state["groups"] or current["param_groups"])
        param_groups = [
            {**options, "params": group["params"]}
            for options, group in zip(groups, current["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        parameters = numbered_parameters(optimizer)
        for number, of_parameter in state.items():
            loaded = optimizer.state[parameters[number]]
            tensors = {name: value for name, value in of_parameter.items() if isinstance(value, Tensor)}
            # load_state_dict has cast these tensors to the parameter's dtype: restore the saved dtype.
            loaded |= {name: value.to(loaded[name].device) for name, value in tensors.items()}
        if scheduler is not None:
            scheduler.load_state_dict(restore_types(scheduler.state_dict(), json_state["scheduler"]))
    except MemoryError:
        raise
    except Exception as error:  # the state comes from a file, and may have any types
        raise InputError(
            f"--resume: the checkpoint belongs to another optimizer or scheduler ({cause(error)}): use those of the run"
        ) from error


def check_updates(
    config: TrainingOptions,
    parameters: Parameters,
    functions: OwnFunctions,
    tensors: Mapping[str, Tensor],
    json_state: Mapping[str, Any],
) -> None:
    """Check a saved state by a step of an optimizer and a scheduler that the run does not use, with gradients of 0.

    A state of wrong types, shapes or keys would otherwise fail in the first step, or in one of a later epoch.

    Args:
        config: Options of the optimizer and the schedule.
        parameters: Parameters of the model on the CPU, with all rows of embeddings. They do not change.
        functions: User-defined functions of the run.
        tensors: Tensors of the state, as for `load_updates`.
        json_state: The rest of the state, as for `load_updates`.

    Raises:
        InputError: The state belongs to another kind of optimizer or scheduler, or the step fails.
    """
    copies = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")  # the rates of the scheduler are for later epochs
        optimizer = make_optimizer(config, copies, functions)
        scheduler = make_scheduler(config, optimizer, functions)
        copied = {name: value.clone() for name, value in tensors.items()}  # a step changes them in place
        load_updates(optimizer, scheduler, copied, copy.deepcopy(dict(json_state)))
        for parameter in copies:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
            advance(scheduler, 0.0, 0.0, lower_is_better=False)
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(
                f"--resume: the checkpoint's state of optimizer or scheduler is damaged ({cause(error)}): give a new "
                "--out to start again"
            ) from error


def require_plain(name: str, state: Any) -> None:
    """Check that a state is unchanged after a round trip through JSON, since checkpoints contain no pickled objects.

    Args:
        name: Kind and name of the object that has the state, for the message.
        state: The state.

    Raises:
        InputError: JSON cannot represent the state.
    """
    try:
        same = restore_types(state, json.loads(json.dumps(state))) == state
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the state_dict of the {name} cannot be saved ({error}): use only numbers, lists and strings"
        ) from error
    if not same:
        raise InputError(
            f"the state_dict of the {name} changes when it is saved as JSON: use only numbers, lists and strings"
        )


def restore_types(example: Any, value: Any) -> Any:
    """Convert a value read from JSON to the types of an example: tuples, and dicts whose keys are numbers.

    Args:
        example: Value of the expected types.
        value: The value from JSON.
    """
    if isinstance(example, tuple):
        return tuple(value)
    if isinstance(example, list) and len(example) == len(value):
        return [restore_types(element, saved) for element, saved in zip(example, value, strict=True)]
    if isinstance(example, dict):
        keys = {str(key): key for key in example}
        restored = copy.copy(example)
        restored.clear()
        restored.update(
            {keys.get(key, key): restore_types(example.get(keys.get(key)), item) for key, item in value.items()}
        )
        return restored
    return value
