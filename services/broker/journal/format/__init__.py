"""Binary format of the journal: records and events."""
