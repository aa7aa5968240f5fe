"""Pure data: what the processes say to each other and what a run is made of. No I/O, no torch."""
