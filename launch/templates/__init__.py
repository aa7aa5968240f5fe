"""Files that `rolloutmq init` writes; `$name` is the name of the environment, `$title` that of its class."""
