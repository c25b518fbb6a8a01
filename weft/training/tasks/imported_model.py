"""Models that are named by where they are defined: `--model package.module:Class`."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import torch
from torch import nn

from weft.config.config import Config
from weft.data import GraphShape
from weft.utils.errors import InputError


def imported_model(name: str, shape: GraphShape, out_width: int, config: Config) -> nn.Module:
    """The module that a class, or a function, makes of (num_features, out_width), from the seed and of the dtype.

    name: `package.module:Class`, found where Python finds modules, and in this folder. Importing runs code: the name
    has to be one that the person gives, and none that a file does.
    InputError where there is none, and where it cannot be called so.
    """
    where, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # a command's path does not have the folder that it is called in
    try:
        made: Any = getattr(importlib.import_module(where), attribute)
        inspect.signature(made).bind(shape.num_features, out_width)
    except (ImportError, ValueError) as error:
        raise InputError(f"--model {name}: no module {where!r} can be imported ({error})") from error
    except AttributeError as error:
        raise InputError(f"--model {name}: {where} has no {attribute!r}: give package.module:Class") from error
    except TypeError as error:
        raise InputError(
            f"--model {name} is called as {attribute}({shape.num_features}, {out_width}), by the widths of rows that "
            f"go in and out, and cannot be ({error}): give a class or a function of these two"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = made(shape.num_features, out_width)
    if not isinstance(model, nn.Module):
        raise InputError(f"--model {name} makes a {type(model).__name__}: give what makes a torch.nn.Module")
    return model.to(getattr(torch, config.dtype))
