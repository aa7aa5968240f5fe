"""The policy of the tiny server, before it is attached."""

import subprocess
import sys
from pathlib import Path


def test_the_code_of_the_model_is_loaded_ahead_and_a_wrong_path_is_left_to_the_trainer(
    tmp_path: Path,
) -> None:
    code = (
        "import sys\n"
        "from rolloutmq.schemas.config.run import ModelConfig\n"
        "from rolloutmq.services.inference.tiny.policy import ServedPolicy\n"
        "name = 'transformers.models.llama.modeling_llama'\n"
        "before = name in sys.modules\n"
        "ServedPolicy.prepare(ModelConfig(path=sys.argv[1]))\n"
        "ServedPolicy.prepare(ModelConfig())\n"
        "print(before, name in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "none")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.split() == ["False", "True"]
