"""The torch side: the policy, what it learns from a batch, the weights it shares, and the loop that drives it."""
