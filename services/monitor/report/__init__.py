"""Reports of an ended run: `summary.json`, `report.png`, the bias report."""
