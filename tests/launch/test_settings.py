"""A configuration has one definition and three sources; a mistake becomes one line."""

from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.rundir import load_run, read_run
from rolloutmq.launch.endings import ProblemsError, problems_of
from rolloutmq.launch.settings import load, load_part, overridden, prepare_service, validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, RecordVersionError
from rolloutmq.schemas.files import RunLayout

FILE = """
[run]
name = "demo"
[broker]
high_bytes = 1000000
[environment.sort3]
entry = "env.py:Env"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_the_last_place_wins(file: Path) -> None:
    environ = {"ROLLOUTMQ_BROKER__HIGH_BYTES": "2000000", "ROLLOUTMQ_RUN__SEED": "7"}
    config = load(file, environ=environ, assignments=["broker.high_bytes=3000000"])
    assert config.broker.high_bytes == 3_000_000
    assert config.run.seed == 7
    assert config.run.name == "demo"
    assert config.base_dir == file.parent


def test_names_of_environments_are_keys(file: Path) -> None:
    config = load(
        file,
        environ={"ROLLOUTMQ_ENVIRONMENT__SORT3__WEIGHT": "2.5"},
        assignments=["environment.sort3.max_workers=9", "environment.sort3.options.digits=4"],
    )
    env = config.environment["sort3"]
    assert (env.weight, env.max_workers, env.options) == (2.5, 9, {"digits": 4})


def test_text_that_is_no_toml_is_text(file: Path) -> None:
    assert load(file, environ={}, assignments=["run.name=other-run"]).run.name == "other-run"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("true", "must be a valid integer (got True)"),
        ('"4"', "must be a valid integer (got '4')"),
        (str(10**23), f"must be less than or equal to 10000 (got {10**23})"),
    ],
)
def test_the_types_of_a_file_are_kept(file: Path, value: str, problem: str) -> None:
    file.write_text(f"{FILE}max_workers = {value}\n")
    with pytest.raises(ConfigError) as refused:
        load(file, environ={}, assignments=())
    assert str(refused.value) == f"environment.sort3.max_workers: {problem}"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("health.stop_on", "solved", "must be a list, such as [\"solved\"] (got 'solved')"),
        ("evaluation.environments", "sort3", "must be a list, such as [\"sort3\"] (got 'sort3')"),
        ("run.http_hosts", "4", "must be a list (got 4)"),
        ("trainer.betas", "0.9", "must be a list (got 0.9)"),
        ("gateway.cors_origins", '""', "must be a list (got '')"),
    ],
)
def test_a_value_in_place_of_a_list_is_refused_with_the_list(
    file: Path, key: str, value: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(file, environ={}, assignments=[f"{key}={value}"])
    assert str(refused.value) == f"{key}: {problem}"


def test_variables_and_assignments_have_no_types(file: Path) -> None:
    environ = {"ROLLOUTMQ_ORCHESTRATOR__ENABLED": "yes", "ROLLOUTMQ_BROKER__REPLAY": "1"}
    assignments = ['environment.sort3.max_workers="9"', "broker.lease_s=060", "run.name='4'"]
    config = load(file, environ=environ, assignments=assignments)
    assert (config.orchestrator.enabled, config.broker.replay) == (True, True)
    assert (config.environment["sort3"].max_workers, config.broker.lease_s) == (9, 60.0)
    assert (config.run.name, type(config.run.name)) == ("4", str)
    with pytest.raises(ConfigError, match=r"run\.seed: must be less than or equal to"):
        load(file, environ={}, assignments=[f"run.seed={10**23}"])


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_number_of_any_length_is_refused_in_one_line(file: Path, digits: int) -> None:
    file.write_text(f"{FILE}max_workers = {'9' * digits}\n")
    with pytest.raises(ConfigError):
        load(file, environ={}, assignments=())


@pytest.mark.parametrize(("name", "shown"), [("a b", "a b"), ("a/b", "a/b"), ("", '""')])
def test_a_name_that_is_none_says_what_a_name_is(name: str, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({"environment": {name: {"entry": "env.py:Env"}}})
    assert str(refused.value) == (
        f"environment.{shown}: must be 1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or a digit "
        f"(got {name!r})"
    )


def test_variables_without_nesting_are_not_ours(file: Path) -> None:
    assert load(file, environ={"ROLLOUTMQ_PROCESS": "x/y", "PATH": "/bin"}).run.seed == 0


@pytest.mark.parametrize(
    ("assignment", "path", "words"),
    [
        ("broker.hig_bytes=1", "broker.hig_bytes", ["unknown key", "`high_bytes`", "lease_s"]),
        ("brokr.high_bytes=1", "brokr", ["unknown key", "`broker`", "trainer"]),
        ("environment.sort3.wieght=1", "environment.sort3.wieght", ["`weight`", "group_size"]),
        ("broker.high_bytes=lots", "broker.high_bytes", ["integer", "'lots'"]),
        ("broker.high_bytes=-1", "broker.high_bytes", ["greater than 0", "-1"]),
        ("broker.listen=udp://h:1", "broker.listen", ["tcp://HOST:PORT", "'udp://h:1'"]),
        ("broker.listen=tcp://0.0.0.0:7760", "broker.listen", ["needs keys", "keys init"]),
        ("run.name=a/b", "run.name", ["must be 1 to 64 letters", "'a/b'"]),
        (
            "environment.sort3.min_workers=5",
            "environment.sort3.min_workers",
            ["must not exceed max_workers 4"],
        ),
        ("environment.sort3.entry=Env", "environment.sort3.entry", ["package.module:Class"]),
        (
            "environment.sort3.group_size=512",
            "environment.sort3.group_size",
            ["512", "trainer.batch_sequences 256"],
        ),
        ("trainer.batch_sequences=0", "trainer.batch_tokens", ["batch_sequences", "set exactly one of them"]),
        ("orchestrator.scaling.up_factor=1", "orchestrator.scaling.up_factor", ["greater than 1"]),
        ("model.heads=3", "model.hidden_size", ["multiple of heads"]),
        ("inference.kind=external", "inference.url", ["must be given"]),
        ("weights.backend=tape", "weights.backend", ["'cuda_ipc' or 'stream'", "'tape'"]),
        ("weights.backend=vllm_http", "weights.backend", ["works only with vLLM", "`tiny`"]),
        (
            "inference.vllm.tensor_parallel=2",
            "inference.vllm.tensor_parallel",
            ["several workers", "`posix_shm` (got 2)", 'weights.backend = "vllm_http"'],
        ),
        ("inference.vllm.compiled=true", "inference.vllm.compiled", ["cannot follow", "vllm_http"]),
        ("environment.eval1.group_size=4", "environment.eval1.entry", ["is required"]),
        ("run=3", "run", ["must be a section", "(got 3)"]),
        ("run.name.x=3", "run.name", ["is a value"]),
        ("seed", "seed", ["key=value"]),
        ("run..seed=1", "run..seed=1", ["dotted key"]),
    ],
)
def test_one_line_names_the_path_and_what_is_allowed(
    file: Path, assignment: str, path: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, environ={}, assignments=[assignment])
    text = str(caught.value)
    assert caught.value.path == path
    assert "\n" not in text
    for word in words:
        assert word in text


def test_every_problem_is_told_at_once(file: Path) -> None:
    with pytest.raises(ProblemsError) as caught:
        load(file, environ={}, assignments=["run.sead=1", "trainer.steps=many", "environment.sort3.entri=1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "the configuration has 3 errors"
    assert {line.partition(":")[0] for line in lines[1:]} == {
        "run.sead",
        "trainer.steps",
        "environment.sort3.entri",
    }
    assert [str(problem) for problem in problems_of(caught.value)] == lines[1:]


def test_what_is_valid_of_a_configuration_is_left_without_the_rest(file: Path) -> None:
    file.write_text(f"{FILE}[environment.wrong]\nentri = 1\n[curriculum.wrong]\n")
    config, problems = load_part(file, environ={}, assignments=["broker.high_byte=1", "trainer.steps=7"])
    assert config is not None
    assert list(config.environment) == ["sort3"]
    assert (config.curriculum, config.trainer.steps, config.broker.high_bytes) == ({}, 7, 1_000_000)
    assert len(problems) == 2
    for wrong in ("environment.wrong=1", "run=2", "environment=3", "curriculum=4"):
        _, problems = load_part(file, environ={}, assignments=[wrong])
        assert wrong.partition("=")[0] in {getattr(problem, "path", "") for problem in problems}
    file.write_text(FILE)
    whole, problems = load_part(file, environ={})
    assert (whole, problems) == (load(file, environ={}), ())


def test_a_budget_of_tokens_takes_the_place_of_the_number_of_sequences(file: Path) -> None:
    config = load(file, environ={}, assignments=["trainer.batch_tokens=4096"])
    assert (config.trainer.batch_sequences, config.trainer.batch_tokens) == (0, 4096)
    assert config.batch_sequences == 32, "of the longest sequences there may be"
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    large = ["trainer.batch_tokens=4096", "environment.sort3.group_size=512", "broker.high_groups=1"]
    assert load(file, environ={}, assignments=large).environment["sort3"].group_size == 512
    with pytest.raises(ConfigError, match=r"trainer\.batch_tokens: .* set exactly one of them"):
        load(file, environ={}, assignments=["trainer.batch_tokens=4096", "trainer.batch_sequences=256"])
    with pytest.raises(
        ConfigError, match=r"broker\.high_bytes: too small for a batch of 300000 tokens \(got 1000000\)"
    ):
        load(file, environ={}, assignments=["trainer.batch_tokens=300_000"])


TAKEN = {
    "cpu": {
        "posix_shm": {"tiny", "vllm", "external", "none"},
        "disk": {"tiny", "external", "none"},
        "vllm_http": {"vllm"},
        "cuda_ipc": set(),
    },
    "cuda:1": {
        "posix_shm": set(),
        "disk": {"tiny", "external", "none"},
        "vllm_http": {"vllm"},
        "cuda_ipc": {"vllm", "external", "none"},
    },
}
"""Who can take the weights of a trainer, by its device and by the backend."""


@pytest.mark.parametrize("kind", ["tiny", "vllm", "external", "none"])
@pytest.mark.parametrize("backend", ["posix_shm", "disk", "vllm_http", "cuda_ipc"])
@pytest.mark.parametrize("device", TAKEN)
def test_weights_go_where_somebody_can_take_them(file: Path, device: str, backend: str, kind: str) -> None:
    works = kind in TAKEN[device][backend]
    chosen = [f"weights.backend={backend}", f"inference.kind={kind}", f"trainer.device={device}"]
    if kind == "external":
        chosen.append("inference.url=http://127.0.0.1:1/v1")
    if works:
        assert load(file, environ={}, assignments=chosen).weights.backend == backend
        return
    with pytest.raises(ConfigError) as caught:
        load(file, environ={}, assignments=chosen)
    assert caught.value.path == "weights.backend"


def test_a_device_is_the_cpu_or_a_gpu_and_several_ranks_have_the_cpu(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device: "):
        load(file, environ={}, assignments=["trainer.device=gpu"])
    with pytest.raises(ConfigError, match=r"trainer\.ranks: must be 1 with device = 'cuda' \(got 2\)"):
        load(file, environ={}, assignments=["trainer.device=cuda", "trainer.ranks=2", "weights.backend=disk"])


def test_weights_on_disk_need_a_writer_or_a_reader(file: Path) -> None:
    idle = ["weights.backend=disk", "trainer.enabled=false"]
    assert load(file, environ={}, assignments=idle).inference.kind == "tiny"
    with pytest.raises(ConfigError, match=r"weights\.backend: no process of this run"):
        load(file, environ={}, assignments=[*idle, "inference.kind=none"])


@pytest.mark.parametrize("section", ["gateway", "inference", "teacher"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_http_beyond_this_machine_must_be_allowed(section: str, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"within reach of .*{section}\.insecure = true") as caught:
        load(None, environ={}, assignments=[f"{section}.host={host}"])
    assert caught.value.path == f"{section}.host"
    allowed = load(None, environ={}, assignments=[f"{section}.host={host}", f"{section}.insecure=true"])
    assert getattr(allowed, section).host == host


def test_a_resolved_configuration_is_overridden_by_the_same_rules(file: Path) -> None:
    config = load(file, environ={}, assignments=["gateway.enabled=true"])
    assert overridden(config, []) == config
    assert overridden(config, ["gateway.port=81"]).gateway.port == 81
    with pytest.raises(ConfigError, match=r"gateway\.insecure = true"):
        overridden(config, ["gateway.host=0.0.0.0"])


def test_shares_above_one_contradict(file: Path) -> None:
    shares = ["environment.sort3.min_share=0.7"]
    other = ["environment.b.entry=b.py:B", "environment.b.min_share=0.6"]
    with pytest.raises(ConfigError, match=r"environment.\*.min_share: must add up to at most 1 \(got 1.3\)"):
        load(file, environ={}, assignments=shares + other)


def test_packages_of_two_owners_with_one_name_contradict() -> None:
    def packages(*named: str) -> dict[str, Any]:
        sections = {f"e{number}": {"verifiers": one} for number, one in enumerate(named)}
        return {"environment": sections}

    with pytest.raises(ConfigError, match=r"e1\.verifiers: must not be another package .*\(got bob/ca-lc\)"):
        validate(packages("alice/ca_lc", "bob/ca-lc"))
    for fine in (("alice/calc", "alice/calc"), ("alice/calc", "calc"), ("alice/calc", "alice/words")):
        assert validate(packages(*fine)).environment["e1"].verifiers == fine[1]


@pytest.mark.parametrize(
    ("encoding", "named"), [("utf-8-sig", "UTF-8 with one"), ("utf-16", "UTF-16"), ("utf-16-be", "UTF-16")]
)
def test_a_file_with_a_byte_order_mark_names_it(encoding: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "windows.toml"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    file.write_text(f"{mark}[run]\nseed = 1\n", encoding=encoding)
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    assert str(caught.value) == (
        f"{file}: must be UTF-8 without a byte order mark (got {named}); save it in this encoding"
    )


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: cannot be read"):
        load(tmp_path / "none.toml", environ={})
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"bad.toml: is not valid TOML"):
        load(bad, environ={})
    bad.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match=r"bad.toml: is not valid TOML"):
        load(bad, environ={})


def test_the_example_with_a_program_is_valid() -> None:
    config = load(Path("examples/atropos_command.toml"), environ={})
    section = config.environment["gsm8k"]
    assert section.command[:3] == ("python", "gsm8k_server.py", "serve")
    assert (section.pacing, section.stale, config.gateway.port) == (False, "pass", 8000)


def test_the_quickstart_is_valid() -> None:
    config = load(Path("examples/quickstart.toml"), environ={})
    assert config.environment["sort3"].max_staleness <= 4
    assert config.trainer.batch_sequences == 16 * 16


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"inference": {"min_engines": 2}}, "inference.min_engines: must not exceed max_engines"),
        ({"inference": {"min_engines": 0}}, "inference.min_engines: "),
        (
            {"inference": {"kind": "external", "url": "http://x/v1", "max_engines": 2}},
            "inference.max_engines: must be 1 with kind `external` (got 2): the run cannot start such a server",
        ),
        (
            {"inference": {"max_engines": 2}, "orchestrator": {"enabled": False}},
            "inference.max_engines: must be 1 without the orchestrator (got 2)",
        ),
        (
            {"environment": {"inference": {"entry": "m:C"}}},
            "environment.inference: reserved name, it means the engines in `rolloutmq scale inference N`",
        ),
    ],
)
def test_engines_that_nobody_can_keep_are_refused(tree: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(tree)
    assert str(caught.value).startswith(complaint)


def test_one_engine_is_what_there_is_unless_told_otherwise() -> None:
    assert (validate({}).inference.min_engines, validate({}).inference.max_engines) == (1, 1)
    assert validate({"inference": {"min_engines": 2, "max_engines": 4}}).inference.max_engines == 4


@pytest.mark.parametrize(
    ("keys", "named", "problem"),
    [
        (["name=gspo", "clip_lo=1"], "trainer.loss.clip_lo", "did you mean `clip_low`?"),
        (["name=cispo", "clip_low=.3"], "trainer.loss.clip_low", "unknown key"),
        (["name=no_such"], "trainer.loss.name", "unknown name (got 'no_such'); allowed: dapo, grpo"),
        (
            ["name=grpoo"],
            "trainer.loss.name",
            "unknown name (got 'grpoo'); did you mean `grpo`? allowed: dapo",
        ),
        (["kl=1", "kl_estimator=k1"], "trainer.loss.kl_estimator", "k1 has no gradient on average"),
        (["correction.level=tokens"], "trainer.loss.correction.level", "'none', 'token' or 'sequence'"),
        (["correction.hi=3"], "trainer.loss.correction.hi", "did you mean `high`?"),
        (["correction.low=3"], "trainer.loss.correction.low", "must not be above high 2 (got 3)"),
        (["name=decoupled_ppo", "correction.level=none"], "trainer.loss.correction.level", "makes it PPO"),
    ],
)
def test_what_is_wrong_with_a_loss_is_named_as_it_is_written(
    keys: list[str], named: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, environ={}, assignments=[f"trainer.loss.{key}" for key in keys])
    assert str(caught.value).startswith(f"{named}: ")
    assert problem in str(caught.value)


def test_a_model_of_ones_own_is_trained_at_a_rate_of_its_own() -> None:
    """The default would destroy a trained model in its first steps."""
    with pytest.raises(
        ConfigError, match=r"^trainer.learning_rate: is required with model.path \(got none\)"
    ):
        validate({"model": {"path": "/models/mine"}})
    told = validate({"model": {"path": "/models/mine"}, "trainer": {"learning_rate": 1e-6}})
    assert validate(told.model_dump()).trainer.learning_rate == 1e-6
    assert validate({"model": {"path": "/models/mine"}, "trainer": {"enabled": False}}).model.path
    assert validate({}).trainer.learning_rate == 1e-3


@pytest.mark.parametrize("name", ["quickstart", "quickstart-vllm"])
def test_the_quickstart_says_what_a_model_of_random_weights_needs(name: str) -> None:
    config = load(Path(__file__).parents[2] / "examples" / f"{name}.toml", environ={})
    assert not config.model.path
    assert config.trainer.learning_rate == 1e-3
    assert (config.trainer.loss.entropy, config.trainer.loss.advantage) == (0.02, "dr_grpo")


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (
            {"teacher": {"path": "x"}},
            "trainer.distillation.kind: must not be `none` with a teacher",
        ),
        (
            {"teacher": {"path": "x"}, "trainer": {"enabled": False, "distillation": {"kind": "full"}}},
            "model.path: required for a teacher with your own trainer",
        ),
        ({"teacher": {"path": "x", "url": "http://y"}}, "teacher.url: must be empty with teacher.path"),
        ({"teacher": {"vllm_url": "http://y"}}, "teacher.vllm_url: needs teacher.path"),
    ],
)
def test_a_teacher_that_nobody_could_learn_from_is_refused(tree: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(tree)
    assert str(refused.value).startswith(complaint)


def test_the_example_of_distillation_is_valid() -> None:
    config = load(Path(__file__).parents[2] / "examples" / "distillation" / "distillation.toml", environ={})
    assert config.teacher.enabled
    assert config.trainer.distillation.teaches
    assert config.trainer.distillation.rl_weight == 0.0


def test_a_directory_that_is_configured_stays_so_unless_something_is_said(tmp_path: Path) -> None:
    seeds = []
    for assignments in (["run.seed=1"], [], ["run.seed=2"]):
        prepare_service(tmp_path / "run", None, assignments)
        seeds.append(load_run(tmp_path / "run")[0].run.seed)
    assert seeds == [1, 1, 2]


def test_an_assignment_changes_only_its_key_of_a_configured_directory(file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prepare_service(run_dir, file, ["run.seed=1"])
    before = load_run(run_dir)[0]
    prepare_service(run_dir, None, ["broker.lease_s=7"], defaults=["run.seed=9"])
    assert load_run(run_dir)[0] == overridden(before, ["broker.lease_s=7"])
    prepare_service(run_dir, file, [], defaults=["run.seed=9"])
    assert load_run(run_dir)[0].run.seed == 9


def test_what_the_loader_fills_in_is_not_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"brokr": {}})
    assert "did you mean `broker`?" in caught.value.problem
    assert "base_dir" not in caught.value.problem


def test_a_service_configures_no_directory_of_another_version(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.journal.mkdir(parents=True)
    (layout.journal / "facts-00000001.rmq").touch()
    with pytest.raises(RecordVersionError):
        prepare_service(layout.root, None, [])
    assert not layout.config.exists()


def test_a_trainer_of_ones_own_has_as_many_steps_as_are_given(tmp_path: Path) -> None:
    def steps(*assignments: str) -> int:
        return load(None, environ={}, assignments=assignments).trainer.steps

    assert steps() == 400
    assert steps("trainer.enabled=false") == 0
    assert steps("trainer.enabled=false", "trainer.steps=7") == 7
    with pytest.raises(ConfigError, match=r"trainer\.steps.*at least 1"):
        steps("trainer.steps=0")
    # What is written says so, too.
    prepare_service(tmp_path / "run", None, [])
    assert (load_run(tmp_path / "run")[0].trainer.enabled, load_run(tmp_path / "run")[0].trainer.steps) == (
        False,
        0,
    )


def test_a_broker_alone_has_no_trainer_unless_it_is_asked_for(file: Path, tmp_path: Path) -> None:
    for number, (given, assignments, enabled) in enumerate(
        [(None, [], False), (None, ["trainer.enabled=true"], True), (file, [], True)]
    ):
        prepare_service(tmp_path / str(number), given, assignments)
        assert load_run(tmp_path / str(number))[0].trainer.enabled is enabled


def test_a_run_with_keys_gets_a_token_of_its_own(tmp_path: Path) -> None:
    prepare_service(tmp_path / "plain", None, [])
    assert read_run(tmp_path / "plain")[0].run.http_token_file is None
    own = RunLayout(tmp_path / "keyed").http_token
    prepare_service(tmp_path / "keyed", None, ["broker.keys=keys"])
    token = own.read_text()
    assert read_run(tmp_path / "keyed")[0].run.http_token_file == own
    prepare_service(tmp_path / "keyed", None, ["run.seed=1"])
    assert (read_run(tmp_path / "keyed")[0].run.http_token_file, own.read_text()) == (own, token)


def test_tokens_let_a_server_listen_beyond_this_host() -> None:
    for tokens in ("run.http_token_file=token", "broker.keys=keys"):
        config = load(None, environ={}, assignments=["inference.host=0.0.0.0", tokens])
        assert config.asks_for_tokens
        assert config.unencrypted == ("inference (0.0.0.0)",)
        files = ["run.tls_cert=c", "run.tls_key=k"]
        assert (
            load(None, environ={}, assignments=["inference.host=0.0.0.0", tokens, *files]).unencrypted == ()
        )
    with pytest.raises(
        ConfigError, match=r"inference\.host: .* asks for no token"
    ):  # TLS alone keeps nobody out
        load(None, environ={}, assignments=["inference.host=0.0.0.0", "run.tls_cert=c", "run.tls_key=k"])
