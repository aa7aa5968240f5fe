"""A page that watches and steers one run in a browser: `rolloutmq dashboard`."""
