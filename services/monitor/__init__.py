"""For people: what happens now (`top`, `status`, `logs`, `tail`) and what happened (`summary.json`, `report.png`)."""
