"""Trackers beside TensorBoard, each an adapter of one package: Weights & Biases, MLflow, Aim, CodeCarbon.

`observe/trackers.py` runs them in threads of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fms_fsdp.config import TrainConfig, as_dict
from fms_fsdp.observe.metrics import Record
from fms_fsdp.observe.trackers import Tracker, numbers


def _known_id(config: TrainConfig, tracker: str) -> str | None:
    """The tracker's own id of this run, from an earlier launch."""
    path = Path(config.output_dir, f"{tracker}.id")
    return path.read_text() if path.exists() else None


def _keep_id(config: TrainConfig, tracker: str, value: str) -> None:
    """Writes the id for later launches, in `<tracker>.id`."""
    Path(config.output_dir, f"{tracker}.id").write_text(value)


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under the names that trackers show; names of a report begin with `train/`."""
    named = numbers(record).items()
    return {
        name if name.startswith(("eval/", "test/")) else f"train/{name}": value
        for name, value in named
    }


class Wandb:
    """Weights & Biases: one run over all launches. The client itself decides on log-in and offline mode."""

    def __init__(self, config: TrainConfig) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.log.tracker_project,
            entity=config.log.tracker_entity or None,
            name=config.run_name,
            id=_known_id(config, "wandb"),
            resume="allow",
            dir=config.output_dir,
            config=as_dict(config),
            settings=wandb.Settings(console="off", quiet=True),
        )
        _keep_id(config, "wandb", self._run.id)
        # its own counter refuses the steps that a resumed run makes again
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log(scalars(record) | {name: record[name] for name in ("step", "tokens_seen")})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow: one run over all launches, at MLFLOW_TRACKING_URI, else in `mlruns/` of the run folder."""

    def __init__(self, config: TrainConfig) -> None:
        import mlflow

        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # mlflow 3 asks whether files are meant
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(Path(config.output_dir, "mlruns").absolute().as_uri())
        mlflow.set_experiment(config.log.tracker_project)
        known = _known_id(config, "mlflow")
        started = mlflow.start_run(run_id=known, run_name=config.run_name, log_system_metrics=False)
        _keep_id(config, "mlflow", started.info.run_id)
        if known is None:
            for name, values in as_dict(config).items():
                mlflow.log_params({f"{name}.{key}": value for key, value in values.items()})
        self._mlflow: Any = mlflow

    def write(self, record: Record) -> None:
        values = scalars(record) | {"tokens_seen": record["tokens_seen"]}
        self._mlflow.log_metrics(values, step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


class Aim:
    """Aim, in `.aim/` of the run folder; one run over all launches."""

    def __init__(self, config: TrainConfig) -> None:
        import aim

        if not Path(config.output_dir, ".aim").exists():
            aim.Repo.from_path(config.output_dir, init=True)
        self._run: Any = aim.Run(
            run_hash=_known_id(config, "aim"),
            repo=config.output_dir,
            experiment=config.log.tracker_project,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        _keep_id(config, "aim", self._run.hash)
        self._run.name = config.run_name
        self._run["config"] = as_dict(config)

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._run.track(value, name=name, step=record["step"])

    def close(self) -> None:
        self._run.close()


class CodeCarbon:
    """CodeCarbon: energy and CO2 of this node, in `emissions.csv` of the run folder. It takes no records."""

    def __init__(self, config: TrainConfig) -> None:
        from codecarbon import OfflineEmissionsTracker

        country = os.environ.get("CODECARBON_COUNTRY_ISO_CODE", "USA")
        self._tracker: Any = OfflineEmissionsTracker(
            project_name=config.log.tracker_project,
            output_dir=config.output_dir,
            country_iso_code=country,
            log_level="error",
            allow_multiple_runs=True,
        )
        self._tracker.start()

    def write(self, record: Record) -> None:
        pass

    def close(self) -> None:
        self._tracker.stop()


ADAPTERS: dict[str, Callable[[TrainConfig], Tracker]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "aim": Aim,
    "codecarbon": CodeCarbon,
}
