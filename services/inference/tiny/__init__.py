"""The tiny inference server: one engine on one CPU core."""
