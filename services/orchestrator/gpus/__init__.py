"""GPUs for workers: which are fit, who has them, and what happens when one is not. All pure but for `steward`.

health      what the samples of one GPU prove
cordons     which GPUs take no new workers, and whose workers must go
promises    memory that workers were promised, from their start until it shows
placement   which GPUs a new worker gets
fleet       the four together, for one host
steward     the fleet in the orchestrator: its file, its events, its processes
"""
