"""RolloutMQ beside SkyRL: its trajectories are groups of the bus. Needs SkyRL 0.3 or 0.4 (extra `skyrl`).

entrypoint  `BusExp`: SkyRL's experiment with the classes below
training    `BusAsyncTraining`, `BusSyncTraining`: mixins that settle the groups of a step, and commit
generator   `BusGenerator`: SkyRL's `generate`, answered by workers of the bus
inference   `ExternalInference`: an inference client without an engine
rows        groups as the rows that SkyRL trains on (pure)

`trainer.integrations.task_feed` asks the tasks and hands out their groups.

Importing this package imports nothing of SkyRL; its modules do.
"""
