"""Files that the trainer writes: how they are laid out, read and written."""
