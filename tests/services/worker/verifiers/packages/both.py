"""A group of two environments of verifiers; each row goes to the one it came from."""

import verifiers as vf
from dialogue import load_environment as load_dialogue
from mishaps import load_environment as load_mishaps


def load_environment() -> vf.Environment:
    return vf.EnvGroup([load_dialogue(turns=2), load_mishaps()], env_names=["dialogue", "mishaps"])
