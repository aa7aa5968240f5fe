"""One set of weights for trainer and server: what it consists of, who may touch it when, where it lies.

share      what every backend can do, and the ladder of proofs
manifest   names, types, shapes and ties of the tensors, and the proof that two sides mean the same (no torch import)
facts      what no shape proves: configuration, scalings (no torch import)
placement  where the tensors lie, also for servers with fused projections (no torch)
tokenizer  the fingerprint of a tokenizer (no torch)
lock       the control page: version, sequence, and the lock that keeps half-written weights from being read (no torch)
nonce      the scratch page: a question to the other side, and its answer (no torch)
binding    makes tensors from elsewhere the weights of a model
proof      where a model's tensors lie, what they hold, what comes of them
posix_shm  the backend for processes of one host: a file in /dev/shm that both map, in its `room`
cuda_ipc   the backend for one GPU, by what `cuda` makes of torch; not yet run on one
disk       the backend for a file system, by `versions`
vllm_http  a copy for vLLM, sent by the interface that it defines, in a `parcel`; `sender` keeps a run's vLLM supplied
backends   which of them a run has, and an address stands for
address    whose the weights of an address are, and what goes when that one is dead (no torch)
"""
