"""The model on one side of shared weights: its tensors bound to shared ones, and the tables it computes itself."""
