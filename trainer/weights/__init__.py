"""One set of weights for trainer and server: what it consists of, who may touch it when, where it lies.

manifest   names, types, shapes and ties of the tensors, and the proof that two sides mean the same (no torch import)
lock       the control page: version, sequence, and the lock that keeps half-written weights from being read (no torch)
binding    makes tensors from elsewhere the weights of a model
posix_shm  the backend for processes of one host: a file in /dev/shm that both map
"""
