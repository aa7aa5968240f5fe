"""A group of two environments of verifiers; each row goes to the one it came from."""

import verifiers as vf


def load_environment() -> vf.Environment:
    members = [vf.load_environment("dialogue", turns=2), vf.load_environment("mishaps")]
    return vf.EnvGroup(members, env_names=["dialogue", "mishaps"])
