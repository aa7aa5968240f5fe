"""The record of a run, `metrics.jsonl`, as series of bounded size."""
