"""Page of all keys of a plant, `docs/reference/plant.md`, made of the models that check them."""

from collections.abc import Iterable, Iterator
from typing import Final

from rolloutmq.launch.reference.configuration import sections
from rolloutmq.services.orchestrator.simulation.plant_file import PlantFile, TrainerPlant

HEAD: Final = """\
# Plant reference

`rolloutmq simulate --plant FILE` simulates the plant that a TOML file describes; the
[autoscaling guide](../guides/autoscaling.md#simulation) has an example. Unknown keys are refused. Names have the unit,
brackets the default.

A value over time (`demand`, `batch`, `per_worker`, `start_s` of an environment, `capacity`) is one of these:

```toml
demand = 40
demand = [[0, 40], [600, 80]]                            # each value holds until the next point
demand = {points = [[0, 40], [600, 80]], lines = true}   # straight lines between the points
demand = {csv = "demand.csv", lines = true}              # columns: seconds, value; beside the plant
```

A file may also have `[orchestrator.scaling]`, with the keys of a [configuration](configuration.md#orchestratorscaling).
`--set KEY=VALUE` replaces any key of the file, and `--set orchestrator.scaling.KEY=VALUE` works without a file too.

The seconds of a CSV file count from its first row. The first value also holds before its point, the last one after it.

This page is generated from the models in `services/orchestrator/simulation/plant_file.py` by `make reference`."""


def page() -> str:
    """Return the page as Markdown."""
    defaults = PlantFile.default().model_copy(update={"trainer": TrainerPlant.default()})
    return "\n\n".join([HEAD, *_own(sections(defaults))]) + "\n"


def _own(paragraphs: Iterable[str]) -> Iterator[str]:
    """Leave out the sections that the configuration reference has."""
    is_own = True
    for text in paragraphs:
        if text.startswith("## "):
            is_own = not text.startswith("## `[orchestrator")
        if is_own:
            yield text
