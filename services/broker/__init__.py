"""The broker: queues groups, applies backpressure, and leases exact batches.

`core` decides and touches no socket, file or clock. `io.data_plane` drives it on the four sockets. `server` starts
and ends it.
"""
