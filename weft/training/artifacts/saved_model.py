"""What a run's folder says of its model beside the weights, and the model made of both, where the graph is not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from weft.config.config import Config, is_imported
from weft.data import GraphShape, TypedShape
from weft.nn import Workload, row_dtype
from weft.training.artifacts import checkpoint
from weft.training.artifacts.checkpoint import Progress
from weft.training.artifacts.run_folder import RunFolder
from weft.training.tasks.task import task_model
from weft.utils import jsonl, migrate
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError, readable

METADATA = "weft"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a run trains, and on what."""

    config: Config
    own_model: str
    """The qualified name of the class of a module of one's own; '': the configuration names the model."""
    own_graph: bool
    """Whether the graph was given as an object, so that the configuration's name of it need not be one to load."""
    shape: GraphShape
    graph: dict[str, Any]
    """Numbers of vertices and edges, the fingerprint of the edges, and the digests of all other arrays (`data`)."""
    num_parameters: int
    """Of the model, an embedding with all its rows."""
    weft: str = version("weft")

    @classmethod
    def of(
        cls, config: Config, work: Workload, *, own_model: str, own_graph: bool, data: dict[str, str]
    ) -> Description:
        """Describe a run of a model on a graph. data: digests of the graph's arrays."""
        graph = work.graph
        return cls(
            config=config,
            own_model=own_model,
            own_graph=own_graph,
            shape=GraphShape.of(graph),
            graph={
                "vertices": graph.num_vertices,
                "edges": graph.num_edges,
                "fingerprint": graph.fingerprint,
                "data": data,
            },
            num_parameters=sum(parameter.numel() for parameter in work.model.parameters()),
        )

    def record(self) -> dict[str, Any]:
        """In values that JSON knows."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "config": asdict(self.config),
            "shape": self.shape.record(),
        }

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> Description:
        """What `record` has said, among other things."""
        known = {name: values[name] for name in cls.__dataclass_fields__}
        config, shape = Config.from_dict(known["config"], "the run"), GraphShape.from_record(known["shape"])
        return cls(**known | {"config": config, "shape": shape})

    def metadata(self, progress: Progress) -> dict[str, str]:
        """What model.safetensors says of its weights: JSON under one name, since several would have no fixed order."""
        best = {"best_epoch": progress.best_epoch, "scores": progress.best_scores or {}}
        return {METADATA: json.dumps(migrate.versioned("model", self.record() | best))}


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel:
    """The best weights of a run so far, and what they are of."""

    folder: RunFolder
    description: Description
    weights: dict[str, Tensor]

    @classmethod
    def read(cls, folder: RunFolder) -> SavedModel:
        """Those of a run: of one that was stopped, as its newest checkpoint has them.

        InputError where there is no run, where it has no checkpoint yet, and for a damaged file.
        """
        if not folder.config.exists():
            raise no_run(folder)
        if folder.summary():
            with readable(folder.model, "train again, in a new folder"), safe_open(folder.model, "pt") as file:
                known = migrate.model(json.loads((file.metadata() or {}).get(METADATA, "{}")), folder.model)
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        else:
            found = checkpoint.newest(folder.checkpoints)
            if found is None:
                raise InputError(f"{folder.path} has no weights yet: its run has neither ended nor left a checkpoint")
            lines = [line for line in jsonl.read(folder.metrics) if line["kind"] == "config"]
            known = migrate.run_description(lines[-1] if lines else {}, folder.path)
            weights = checkpoint.tensors_under("best.", found.tensors)
        with readable(folder.path, "train again, in a new folder"):
            return cls(folder=folder, run_description=Description.from_record(known), weights=weights)

    def model(self, module: nn.Module | str | None = None, typed: TypedShape | None = None) -> nn.Module:
        """The model with these weights: a module of one's own, or one of weft's as the configuration says.

        Nothing is imported that the files of the run name: they may come from anybody.

        module: may say where it is defined, as --model does. typed: of the graph that it is for, if it is another one.
        InputError for a module of another structure or type, and where there has to be one.
        """
        path, config = self.folder.path, self.description.config
        class_name = self.description.own_model or (config.model if is_imported(config.model) else "")
        if module is None and class_name:
            raise InputError(
                f"{path}: its model is a {class_name}, a class that weft does not import: make one as for the run and "
                "give it, as in weft.load_model(run, model) or weft.predict(run, model=model), or say where it is "
                "defined, as in --model package.module:Class"
            )
        shape = self.description.shape if typed is None else replace(self.description.shape, typed=typed)
        model = task_model(module, shape, config)
        if dtype_name(row_dtype(model)) != config.dtype:
            raise InputError(f"{path} was trained in {config.dtype}: convert the model to that")
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            cause = str(error).splitlines()[-1].strip()
            raise InputError(f"{path} has the weights of another model ({cause}): make it as for the run") from error
        return model.eval()


def no_run(folder: RunFolder) -> InputError:
    """The error for a folder that is not that of a run."""
    return InputError(f"{folder.path} holds no run (no config.toml): give the folder of one")


def load_model(run: str | Path, model: nn.Module | str | None = None) -> nn.Module:
    """The model of a run's folder with its best weights, on the CPU; without its graph.

    model: a module of one's own, as it was made for the run, which gets the weights; needed where the run was given
    one, since no class is imported by name. With task="link" the result is a weft.nn.LinkModel.
    InputError for a folder without weights, a damaged one, and a module of another structure.
    """
    return SavedModel.read(RunFolder(Path(run))).model(model)
