"""Writers of the journal: the commit thread and its two logs."""
