"""Views of a run: live (`top`, `status`, `logs`, `tail`) and after its end (`summary.json`, `report.png`)."""
