"""Search for hyperparameters with Optuna, which ends trials that fall behind: `pip install optuna`."""

import optuna

import weft


def objective(trial):
    def report(record):
        """Report an epoch to Optuna; True ends the run."""
        trial.report(record["val_accuracy"], record["epoch"])
        return trial.should_prune()

    run = weft.train(
        "digits",
        hidden=trial.suggest_int("hidden", 8, 128, log=True),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        epochs=30,
        callbacks=[report],
        quiet=True,
    )
    if trial.should_prune():
        raise optuna.TrialPruned
    return run.summary["val_accuracy"]


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    study.optimize(objective, n_trials=6)
    print(f"validation accuracy {study.best_value:.3f} with {study.best_params}")
