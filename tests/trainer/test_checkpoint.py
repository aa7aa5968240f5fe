import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rolloutmq.bus.files import sum_of
from rolloutmq.schemas.config.run import ModelConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import ConfigError, DamagedFileError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer import checkpoint
from rolloutmq.trainer.files import checkpoints as checkpoint_files
from rolloutmq.trainer.files.checkpoints import TrainerState
from rolloutmq.trainer.policy.model import Policy, build_policy, write_identity
from rolloutmq.trainer.policy.tokenizer import configured_fingerprint
from rolloutmq.trainer.step.optimizer import PolicyOptimizer

MODEL = ModelConfig(hidden_size=16, layers=1, mlp_size=16)


def save(root: Path, step: int, policy: Policy, incarnation: int = 0) -> Path:
    identity = root / "model"
    write_identity(policy, MODEL, identity)
    state = TrainerState(version=PolicyVersion(incarnation, step), unsettled=("a", "b"))
    return checkpoint.save(
        root / "checkpoints", identity, state, policy, PolicyOptimizer(policy, TrainerConfig())
    )


def prune(written: Path, keep: int, began: int = 0, proven: set[Path] | None = None) -> None:
    checkpoint.prune(written, keep, began=began, proven=set() if proven is None else proven)


def steps(root: Path) -> list[str]:
    return [path.name for path in checkpoint_files.saved(root / "checkpoints")]


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_comes_back(tmp_path: Path, tied: bool) -> None:
    config = MODEL.model_copy(update={"tie_embeddings": tied})
    policy = build_policy(config, 1)
    path = save(tmp_path, 50, policy)
    assert path.name == "step-000050"
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.state.version, found.state.unsettled) == (PolicyVersion(0, 50), ("a", "b"))
    again = build_policy(config, 2)
    checkpoint.restore_policy(found, again)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))
    assert not list(path.parent.glob(".*"))


def test_another_tokenizer_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    """The same characters in another order: all shapes fit, and every token means something else."""
    save(tmp_path, 1, build_policy(MODEL, 1))
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    checkpoint.require_tokenizer(found, configured_fingerprint(MODEL))
    checkpoint.require_tokenizer(found, "")
    other = MODEL.model_copy(update={"alphabet": MODEL.alphabet[::-1]})
    with pytest.raises(ConfigError, match=r"model: has another tokenizer than the checkpoint"):
        checkpoint.require_tokenizer(found, configured_fingerprint(other))


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    save(tmp_path, 1, build_policy(MODEL, 1))
    expected = torch.rand(4)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    torch.set_rng_state(checkpoint.random_state(found))
    assert torch.equal(torch.rand(4), expected)


def test_transformers_loads_a_checkpoint(tmp_path: Path) -> None:
    disable_progress_bar()
    policy = build_policy(MODEL, 1)
    path = save(tmp_path, 1, policy)
    again = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(path)("1=").input_ids == [1, 4, 13]


@pytest.mark.usefixtures("open_umask")
def test_all_files_are_for_their_user_alone(tmp_path: Path) -> None:
    written = save(tmp_path, 1, build_policy(MODEL, 1))
    checkpoint.next_incarnation(written.parent)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert {"state.json", "model.safetensors", "tokenizer.json", "config.json", "incarnation"} <= modes.keys()
    assert set(modes.values()) == {0o600}, modes


def test_another_policy_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, build_policy(MODEL, 1))
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    with pytest.raises(ConfigError, match="does not fit the checkpoint"):
        checkpoint.restore_policy(found, build_policy(MODEL.model_copy(update={"layers": 2}), 1))


def test_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "cut", "scrambled"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    policy = build_policy(MODEL, 1)
    save(tmp_path, 1, policy)
    path = save(tmp_path, 2, policy) / file
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(b"\xff" * path.stat().st_size)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.version.step == 1
    assert f"checkpoint skipped path={path.parent}" in caplog.text


@pytest.mark.parametrize("place", [0.02, 0.3, 0.999])
@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "optimizer.safetensors", "config.json"])
def test_a_checkpoint_with_one_bit_turned_is_passed_over(tmp_path: Path, file: str, place: float) -> None:
    policy = build_policy(MODEL, 1)
    save(tmp_path, 1, policy)
    path = save(tmp_path, 2, policy) / file
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.version.step == 1


def test_every_bit_of_the_state_is_looked_at(tmp_path: Path) -> None:
    path = save(tmp_path, 1, build_policy(MODEL, 1)) / "state.json"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert checkpoint.latest(tmp_path / "checkpoints") is None, place


def test_a_checkpoint_from_before_there_were_checksums_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1, build_policy(MODEL, 1)) / "state.json"
    state = msgspec.json.decode(path.read_bytes())
    del state["sums"], state["own"]
    path.write_bytes(msgspec.json.encode(state))
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.version == PolicyVersion(0, 1)


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build_policy(MODEL, 1)
    save(tmp_path, 1, policy)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            save(tmp_path, 2, policy)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    save(tmp_path, 2, policy)
    assert steps(tmp_path) == ["step-000001", "step-000002"]


class Disk:
    """Notes in order what is forced to disk, with what it held then, and what is renamed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[str, Path, object]] = []
        patch.setattr(os, "fsync", self._forced)
        for call in ("rename", "replace"):
            patch.setattr(Path, call, self._noting(getattr(Path, call)))

    def _forced(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        self.noted.append(("forced", path, contents(path)))

    def _noting(self, move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def moved(path: Path, target: Path) -> Path:
            self.noted.append(("moved", path, target))
            return move(path, target)

        return moved

    def around(self, target: Path) -> tuple[dict[Path, object], list[Path]]:
        """What was forced before something got the name `target`, with its contents, and what was forced after."""
        moves = [(call, place) for call, _, place in self.noted]
        at = moves.index(("moved", target))
        before = {path: held for call, path, held in self.noted[:at] if call == "forced"}
        return before, [path for call, path, _ in self.noted[at + 1 :] if call == "forced"]


def contents(path: Path) -> object:
    return path.read_bytes() if path.is_file() else {one.name for one in path.iterdir()}


def test_a_checkpoint_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name whose files were not forced to disk stands for empty files."""
    disk = Disk(monkeypatch)
    final = save(tmp_path, 1, build_policy(MODEL, 1))
    before, after = disk.around(final)
    partial = final.with_name(".step-000001.partial")
    names = contents(final)
    assert {path: held for path, held in before.items() if path.is_relative_to(partial)} == {
        partial: names,
        **{partial / path.name: contents(path) for path in final.iterdir()},
    }
    assert after == [final.parent]


def test_an_incarnation_is_on_disk_before_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    assert checkpoint.next_incarnation(tmp_path) == 0
    before, after = disk.around(tmp_path / checkpoint.INCARNATIONS)
    assert before == {tmp_path / f".{checkpoint.INCARNATIONS}.partial": b"0\n"}
    assert after == [tmp_path]


def test_a_step_that_is_reached_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, build_policy(MODEL, 1))
    save(tmp_path, 1, build_policy(MODEL, 2), incarnation=3)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.version == PolicyVersion(3, 1)


def test_what_a_killed_trainer_left_half_written_makes_room_for_the_next(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step-000011.partial"
    left.mkdir(parents=True)
    policy = build_policy(MODEL, 1)
    optimizer, state = PolicyOptimizer(policy, TrainerConfig()), TrainerState(version=PolicyVersion(1, 10))
    identity = tmp_path / "model"
    write_identity(policy, MODEL, identity)
    own_tensors, found = checkpoint.own_tensors, list[bool]()

    def looked(one: Policy) -> dict[str, torch.Tensor]:
        found.append(left.exists())
        return own_tensors(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "own_tensors", looked)
        checkpoint.save(tmp_path / "checkpoints", identity, state, policy, optimizer)
    assert found == [False]


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    policy = build_policy(MODEL, 1)
    for step in (1, 2, 10):
        path = save(tmp_path, step, policy)
    (tmp_path / "checkpoints" / "step-000001-of-mine").mkdir()
    prune(path, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000001-of-mine",
        "step-000002",
        "step-000010",
    ]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("file", ["state.json", "model.safetensors"])
def test_pruning_never_removes_what_was_just_saved(tmp_path: Path, keep: int, file: str) -> None:
    policy = build_policy(MODEL, 1)
    damaged = save(tmp_path, 8, policy) / file
    os.truncate(damaged, damaged.stat().st_size // 2)
    prune(save(tmp_path, 2, policy, incarnation=1), keep)
    assert steps(tmp_path) == ["step-000002"]
    prune(save(tmp_path, 4, policy, incarnation=1), keep)
    assert steps(tmp_path) == ["step-000002", "step-000004"][-keep:]


def test_a_damaged_checkpoint_is_kept_in_place_of_no_whole_one(tmp_path: Path) -> None:
    policy = build_policy(MODEL, 1)
    for step in (1, 2, 3):
        path = save(tmp_path, step, policy)
    (tmp_path / "checkpoints" / "step-000002" / "optimizer.safetensors").unlink()
    prune(path, keep=2)
    assert steps(tmp_path) == ["step-000001", "step-000003"]


def test_what_has_a_wrong_bit_takes_the_place_of_no_whole_one_and_each_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, proven = build_policy(MODEL, 1), set[Path]()
    one, two, three = (save(tmp_path, step, policy) for step in (1, 2, 3))
    data = bytearray((two / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (two / "model.safetensors").write_bytes(data)
    read = list[str]()

    def counted(path: Path) -> int:
        read.append(path.parent.name)
        return sum_of(path)

    monkeypatch.setattr(checkpoint_files, "sum_of", counted)
    prune(three, keep=2, proven=proven)
    assert steps(tmp_path) == ["step-000001", "step-000003"]
    assert set(read) == {"step-000001", "step-000002"}  # what was just written is known
    assert proven == {one, three}
    four = save(tmp_path, 4, policy)
    read.clear()
    prune(four, keep=3, proven=proven)
    assert steps(tmp_path) == ["step-000001", "step-000003", "step-000004"]
    assert read == []
    (three / "model.safetensors").unlink()  # seen without being read
    prune(save(tmp_path, 5, policy), keep=3, proven=proven)
    assert steps(tmp_path) == ["step-000001", "step-000004", "step-000005"]


def test_a_step_that_this_life_passed_over_is_not_kept_before_the_one_it_went_on_from(tmp_path: Path) -> None:
    """It could not be read then, and can be now: others have been taken in its place since."""
    policy = build_policy(MODEL, 1)
    for step in (10, 20):
        save(tmp_path, step, policy)
    prune(save(tmp_path, 25, policy, incarnation=1), keep=2, began=10)
    assert steps(tmp_path) == ["step-000010", "step-000025"]


def test_what_cannot_be_removed_does_not_end_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = build_policy(MODEL, 1)
    one, two, three = (save(tmp_path, step, policy) for step in (1, 2, 3))
    rmtree = shutil.rmtree

    def busy(path: Path) -> None:
        if path == one:
            raise OSError(39, "Directory not empty")
        rmtree(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        prune(three, keep=1)
    assert f"checkpoint not removed path={one}" in caplog.text
    assert not two.exists()
    prune(three, keep=1)
    assert steps(tmp_path) == ["step-000003"]


def test_steps_that_a_later_life_made_void_are_never_gone_back_to(tmp_path: Path) -> None:
    """Killed before it could sweep: the later step, which is whole again, is not newer."""
    policy = build_policy(MODEL, 1)
    save(tmp_path, 8, policy)
    save(tmp_path, 2, policy, incarnation=1)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.version == PolicyVersion(1, 2)


def test_steps_are_numbers(tmp_path: Path) -> None:
    policy = build_policy(MODEL, 1)
    for step in (999_950, 1_000_000):
        path = save(tmp_path, step, policy)
    assert steps(tmp_path) == ["step-999950", "step-1000000"]
    prune(path, keep=1)
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.version.step == 1_000_000


def test_incarnations_are_never_given_twice(tmp_path: Path) -> None:
    assert [checkpoint.next_incarnation(tmp_path / "checkpoints") for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("found", [b"", b"\xff7\n", b"7 8\n"])
def test_a_damaged_counter_of_incarnations_is_told(tmp_path: Path, found: bytes) -> None:
    (tmp_path / checkpoint.INCARNATIONS).write_bytes(found)
    with pytest.raises(DamagedFileError, match="incarnation, line 1: must be a number"):
        checkpoint.next_incarnation(tmp_path)


def test_a_checkpoint_brought_from_elsewhere_is_of_an_earlier_life(tmp_path: Path) -> None:
    save(tmp_path, 5, build_policy(MODEL, 1), incarnation=6)
    assert [checkpoint.next_incarnation(tmp_path / "checkpoints") for _ in range(2)] == [7, 8]
