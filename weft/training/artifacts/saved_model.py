"""Trained model in a run's folder: its description and weights, from which it is created without the graph."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from weft.config.config import Config, is_imported
from weft.data import GraphShape, TypedShape, embedded_names
from weft.data.store.store import schema_entry
from weft.nn import Workload, row_dtype
from weft.training.artifacts import checkpoint
from weft.training.artifacts.checkpoint import Progress
from weft.training.artifacts.run_folder import RunFolder
from weft.training.tasks.task import task_model
from weft.utils.dtypes import dtype_name
from weft.utils.errors import InputError, readable
from weft.utils.files import jsonl, migrate
from weft.utils.files.tensor_file import open_tensors

METADATA = "weft"
"""Key of the description in the metadata of model.safetensors."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of the configuration, the model and the graph of a run."""

    config: Config
    own_model: str
    """Qualified class name of a custom module. Empty: the configuration names a built-in model."""
    own_graph: bool
    """True if the caller passed a Graph object, so that the name in the configuration may not be loadable."""
    shape: GraphShape
    """Widths and types of the graph, from which a built-in model is created."""
    graph: dict[str, Any]
    """Numbers of vertices and edges, the fingerprint of the edges, the digests of all other arrays (`data`), and the
    record of the tables that the graph comes from (`schema`), if it comes from some. `embedded` is the digest of the
    names of vertices with a trained row, if they have names."""
    num_parameters: int
    """Number of elements of all parameters, with all rows of embeddings."""
    weft: str = version("weft")
    """Version of weft."""

    @classmethod
    def of(
        cls, config: Config, work: Workload, *, own_model: str, own_graph: bool, data: dict[str, str]
    ) -> Description:
        """Describe a run.

        Args:
            config: The run's configuration.
            work: The model and graph.
            own_model: Qualified class name of a custom module, or empty.
            own_graph: True if the caller passed a Graph object.
            data: Digests of the graph's arrays.
        """
        graph = work.graph
        return cls(
            config=config,
            own_model=own_model,
            own_graph=own_graph,
            shape=GraphShape.of(graph, config.task),
            graph={
                "vertices": graph.num_vertices,
                "edges": graph.num_edges,
                "fingerprint": graph.fingerprint,
                "data": data,
                **schema_entry(graph.schema),
                **({} if (names := embedded_names(graph)) is None else {"embedded": names}),
            },
            num_parameters=sum(parameter.numel() for parameter in work.model.parameters()),
        )

    def record(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "config": asdict(self.config),
            "shape": self.shape.record(),
        }

    @classmethod
    def from_record(cls, values: dict[str, Any]) -> Description:
        """Return the description in a record, which may have other keys as well."""
        fields = {name: values[name] for name in cls.__dataclass_fields__}
        config, shape = Config.from_dict(fields["config"], "the run"), GraphShape.from_record(fields["shape"])
        return cls(**fields | {"config": config, "shape": shape})

    def metadata(self, progress: Progress) -> dict[str, str]:
        """Return the metadata of model.safetensors.

        All is JSON under a single key, because safetensors does not keep the order of keys.
        """
        best = {"best_epoch": progress.best_epoch, "scores": progress.best_scores or {}}
        return {METADATA: json.dumps(migrate.versioned("model", self.record() | best))}


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel:
    """Best weights of a run so far, and the description of its model."""

    folder: RunFolder
    """Folder of the run."""
    description: Description
    """Description of model and graph."""
    weights: dict[str, Tensor]
    """Best weights by name."""

    @classmethod
    def read(cls, folder: RunFolder) -> SavedModel:
        """Read the best weights of a run; of one that was stopped, from its newest checkpoint.

        Raises:
            InputError: The folder contains no run, the run has no checkpoint yet, or a file is damaged.
        """
        if not folder.config.exists():
            raise no_run(folder)
        if folder.summary():
            with readable(folder.model, "train again, in a new folder"), open_tensors(folder.model) as file:
                record = migrate.model(json.loads((file.metadata() or {}).get(METADATA, "{}")), folder.model)
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file is not a mapping
        else:
            saved = checkpoint.newest(folder.checkpoints)
            if saved is None:
                raise InputError(
                    f"{folder.path} has no weights yet: its run has neither ended nor written a checkpoint"
                )
            lines = [line for line in jsonl.read(folder.metrics) if line["kind"] == "config"]
            record = migrate.run_description(lines[-1] if lines else {}, folder.path)
            weights = checkpoint.tensors_under("best.", saved.tensors)
        with readable(folder.path, "train again, in a new folder"):
            return cls(folder=folder, description=Description.from_record(record), weights=weights)

    def model(self, module: nn.Module | str | None = None, typed: TypedShape | None = None) -> nn.Module:
        """Return the model with the saved weights.

        No code that the files of the run name is imported, because the files may come from anybody, except for a model
        that an installed package declares.

        Args:
            module: A custom module, or `package.module:Class` of one, as --model accepts it. None: a built-in model.
            typed: Vertex and edge types of another graph, for which the model is created. Default: those of the run's
                graph.

        Raises:
            InputError: The module has another structure or dtype, or the run had a custom module and none is passed.
        """
        path, config = self.folder.path, self.description.config
        class_name = self.description.own_model or (config.model if is_imported(config.model) else "")
        if module is None and class_name == config.model and not is_imported(class_name):
            module = class_name  # declared by an installed package
        if module is None and class_name:
            raise InputError(
                f"{path}: its model is a {class_name}, a custom class that weft does not import by itself: create one "
                "as for "
                "training and pass it, as in weft.load_model(run, model) or weft.predict(run, model=model), or say "
                "where it is defined, as in --model package.module:Class"
            )
        shape = self.description.shape if typed is None else replace(self.description.shape, typed=typed)
        model = task_model(module, shape, config, strategy=config.strategy)
        if dtype_name(row_dtype(model)) != config.dtype:
            raise InputError(f"{path} was trained in {config.dtype}: convert the model to that")
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            cause = str(error).splitlines()[-1].strip()
            raise InputError(
                f"{path} contains the weights of another model ({cause}): create the model as for training"
            ) from error
        return model.eval()


def no_run(folder: RunFolder) -> InputError:
    """Return the error for a folder that contains no run."""
    return InputError(f"{folder.path} contains no run (no config.toml): give the folder of a run")


def load_model(run: str | Path, model: nn.Module | str | None = None) -> nn.Module:
    """Return the model of a run with its best weights, on the CPU. The graph is not needed.

    With task="link" or "edge", the result is a weft.nn.LinkModel.

    Args:
        run: Folder of the run.
        model: A custom module, created as for the run, which receives the weights. It is needed if the run had one,
            because weft does not import classes that files name.

    Raises:
        InputError: The folder has no weights or is damaged, or the module has another structure.
    """
    return SavedModel.read(RunFolder(Path(run))).model(model)
