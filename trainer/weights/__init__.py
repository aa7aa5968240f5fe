"""Shared weights: one set of weights for trainer and inference server.

share        interface of all backends, and the levels of verification
manifest     names, types, shapes and ties of the tensors, and the check that two sides agree (no torch)
layout       offsets of the tensors, also for servers with fused projections (no torch)
fingerprint  model properties that shapes do not show, and the tokenizer's fingerprint (no torch)
model        a model on one side: shared tensors bound to it, and the tables that it computes itself
lock         control page: version, sequence, and the lock against half-written weights (no torch)
verify       scratch page for questions between both sides; aliases, digests and logits of a model
posix_shm    backend for processes of one host: a file in /dev/shm that both map
cuda_ipc     backend for one GPU
disk         backend for a file system: a directory per version
vllm_http    transfer of a copy to vLLM through its HTTP interface
backends     choice of the backend of a run or an address file
address      owner of the weights in an address file, and the sweep after a dead owner (no torch)
"""
