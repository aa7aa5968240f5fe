"""What the broker leaves on disk: groups in segments, facts in logs, and who reads them back."""
