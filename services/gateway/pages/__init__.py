"""The gateway's own pages: state, metrics, and documentation of its endpoints."""
