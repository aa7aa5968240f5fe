"""What is promised and what is measured: `make accept` and `make bench`."""
