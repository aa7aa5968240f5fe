"""Stream of weights: from the shared memory of one host to that of another. No module here imports torch.

    trainer's host:  segment -> snapshots -> sender  --(TCP, sealed)-->  receiver -> stage -> segment  :other host

chunks     equal parts of the tensors' memory, and their digests (pure)
messages   messages of a transfer, and their bounds (pure)
channel    one connection: handshake, frames, encryption
segment    a segment of `posix_shm` as bytes: read by the sender, written by the receiver
snapshots  versions that do not change, for the transfers under way
sender     server of the versions of one segment
stage      chunks of the next version, until it is whole
receiver   transfers into a stage, and the switch to a whole version
sources    where a relay gets the weights: the broker of another host, or a run directory
relay      the process: a sender, and a receiver if the weights come from another host
"""
