"""Commands that read the records of a run: its journal, and the logs of producers, broker and trainer."""
