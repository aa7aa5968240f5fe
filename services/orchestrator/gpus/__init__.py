"""GPUs for workers: fitness, assignment, and the response to faults. All pure, except `manager`.

health        verdict on one GPU from its samples
cordons       GPUs that take no new workers, and GPUs whose workers must leave
reservations  memory granted to workers, from their start until it shows
placement     GPUs of a new worker
fleet         the four together, for one host
manager       the fleet in the orchestrator: its file, its events, its processes
"""
