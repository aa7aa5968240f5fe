"""The configuration of a run: one frozen model for each section of the TOML file.

A configuration comes from a TOML file, environment variables and `--set key=value` (see `launch.settings`). The
launcher writes the resolved result to `config.json` in the run directory, and every process of the run reads that file.
The docstring under a field is its documentation: the field's name has the unit, the docstring has the reason for a
default.
"""
