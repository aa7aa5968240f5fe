"""MLflow: one run for each run of ours, resumed by its id after a restart.

The server is `telemetry.mlflow_uri` or `MLFLOW_TRACKING_URI`; without either the files are in `trackers/mlflow/` of the
run directory, which `mlflow-skinny` can write without a database.
"""

import os
import re
from collections.abc import Iterator

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.telemetry.export.sinks.identity import TrackerFiles, project_of
from rolloutmq.services.telemetry.export.sinks.points import Point

BATCH = 1000
"""Most figures of one request, a limit of MLflow."""
PARAM_LIMIT = 500
"""Longest value of a parameter, in characters."""
PARAMS = 100
"""Most parameters of one request."""
KEY = re.compile(r"[\w.\-/ ]{1,250}", re.ASCII)
"""Names that MLflow accepts."""
_GROUP = "rolloutmq.group"


class MlflowRun:
    """A run of MLflow, in the experiment of the project."""

    def __init__(self, config: RunConfig, layout: RunLayout) -> None:
        files = TrackerFiles(layout, "mlflow")
        uri = config.telemetry.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            # MLflow asks for this word, since it prefers a database.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            uri = files.directory.resolve().as_uri()
        # Else a server that is away holds a point for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        self._client = MlflowClient(uri)
        self._id = files.id
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = files.id = self._begin(config)

    def log(self, point: Point) -> None:
        """Send a point. Blocks until the server has it."""
        at_ms = int(point.at * 1000)
        metrics = [
            Metric(name, float("nan") if value is None else value, at_ms, point.step)
            for name, value in point.values.items()
            if KEY.fullmatch(name)
        ]
        for start in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + BATCH])

    def finish(self) -> None:
        """Leave the run as finished; a later life opens it again."""
        self._client.set_terminated(self._id)

    def _begin(self, config: RunConfig) -> str:
        project = project_of(config)
        experiment = self._client.get_experiment_by_name(project)
        try:
            found = experiment.experiment_id if experiment else self._client.create_experiment(project)
        except MlflowException:  # another run made it at the same time
            experiment = self._client.get_experiment_by_name(project)
            if experiment is None:
                raise
            found = experiment.experiment_id
        tags = {_GROUP: config.run.tracking_group} if config.run.tracking_group else {}
        run = self._client.create_run(found, run_name=config.run.name, tags=tags)
        params = [*_params(config)]
        for start in range(0, len(params), PARAMS):
            self._client.log_batch(run.info.run_id, params=params[start : start + PARAMS])
        return str(run.info.run_id)


def _params(config: RunConfig) -> Iterator[Param]:
    """Yield the configuration as parameters, by dotted key."""
    for key, value in _flat("", config.model_dump(mode="json")):
        if KEY.fullmatch(key):
            yield Param(key, str(value)[:PARAM_LIMIT])


def _flat(prefix: str, values: dict[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
