"""The broker: takes in groups, holds them back or lets them through, and hands out exact batches under leases.

`core` decides and touches no socket, file or clock; `dataplane` drives it on the four sockets; `server` is its life.
"""
