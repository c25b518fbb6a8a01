"""Callbacks for Weights & Biases and for MLflow: `pip install wandb mlflow`.

weft calls them on rank 0 with the record of each epoch, and calls `close` at the end. For TensorBoard, weft has the
option `tensorboard=True`.
"""

import weft


class WeightsAndBiases:
    """Logs to a run of Weights & Biases. Its options are those of `wandb.init`."""

    def __init__(self, **options):
        self.options, self.run = options, None

    def __call__(self, record):
        import wandb

        self.run = self.run or wandb.init(**self.options)  # in the first call: local ranks are other processes
        self.run.log(record, step=record["epoch"])

    def close(self):
        if self.run:
            self.run.finish()


class MLflow:
    """Logs to a run of MLflow, at the address in MLFLOW_TRACKING_URI."""

    def __init__(self, experiment):
        self.experiment, self.run = experiment, None

    def __call__(self, record):
        import mlflow

        if self.run is None:
            mlflow.set_experiment(self.experiment)
            self.run = mlflow.start_run()
        numbers = {name: value for name, value in record.items() if isinstance(value, float)}
        mlflow.log_metrics(numbers, step=record["epoch"])

    def close(self):
        import mlflow

        if self.run:
            mlflow.end_run()


if __name__ == "__main__":
    run = weft.train(
        "digits",
        epochs=30,
        lr=0.05,
        callbacks=[WeightsAndBiases(project="weft", mode="offline"), MLflow("weft")],
        quiet=True,
    )
    print(f"test accuracy {run.summary['test_accuracy']:.3f}")
