"""Commands about rewards: whether scores are the same again, and whether raters agree."""
