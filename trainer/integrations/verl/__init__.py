"""RolloutMQ beside verl: the groups of the bus are trajectories in verl's TransferQueue. Needs verl 0.9 (extra `verl`).

manager   `BusAgentLoopManager`: verl's agent loop manager, answered by workers of the bus
sampling  `BusReplayBuffer`, `BusReplayBufferAsync`, `BusCheckpoint`: settle the groups of a step, and commit
bridge    asks for the groups, puts them into TransferQueue, and reports their outcome
settings  verl's settings that the adapter depends on
store     TransferQueue, as the bridge writes it
rows      groups as the keys, fields and tags that verl reads (pure)
prompts   prompts of a verl batch, and their tasks (pure)

Importing this package imports nothing of verl; `manager`, `sampling`, `settings` and `store` do.
"""
