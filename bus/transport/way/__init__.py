"""The way to a broker: its address and key as the files of a run tell them now, and the addresses of a name."""
