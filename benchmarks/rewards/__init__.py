"""Evidence that rewards and curriculum act: whole runs with their controls, compared on a fixed evaluation set."""
