"""`card launch`: scripts that say what was asked, Megatron's own layouts, refusals before anything waits in a queue."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from card_megatron.commands import launch
from card_megatron.config import ConfigError
from card_megatron.config.schema import ParallelConfig
from card_megatron.launch.job import Job, parse_options, seconds_of
from card_megatron.launch.layout import crossings, groups_of, places, table
from card_megatron.testing import run_distributed

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
MOCK = [
    "--data.mock=true",
    "--model.vocab_size=500",
    "--train.train_iters=100",
    "--train.global_batch_size=64",
    "--train.micro_batch_size=4",
]
TRAIN = ["train", "--preset=tiny", *MOCK, "--run_dir=runs/x", "--nodes=2", "--gpus-per-node=8"]


def printed(capsys, *arguments: str) -> str:
    launch.run([*arguments])
    return capsys.readouterr().out.replace(" \\\n  ", " ")  # long commands on one line


def options_of(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def is_bash(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


# ---------------------------------------------------------------- scripts


def test_a_training_script_has_what_was_asked_and_the_command_once(capsys):
    asked = [
        "--partition=h100",
        "--time=24:00:00",
        "--signal=USR1@600",
        "--account=me",
        "--qos=high",
        "--exclude=n[1-2]",
    ]
    asked += [
        "--constraint=ib",
        "--reservation=r",
        "--cpus-per-rank=12",
        "--sbatch=mail-type=END",
        "--sbatch=exclusive",
    ]
    script = printed(capsys, *TRAIN, *asked, "--print")
    assert is_bash(script)
    wanted = [
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=12",
        "--time=24:00:00",
        "--requeue",
    ]
    wanted += [
        "--signal=B:USR1@600",
        "--partition=h100",
        "--account=me",
        "--qos=high",
        "--constraint=ib",
        "--reservation=r",
    ]
    wanted += ["--mail-type=END", "--exclusive", "--job-name=x", "'--exclude=n[1-2]'".strip("'")]
    found = [option.replace("'", "") for option in options_of(script)]
    assert set(wanted) <= set(found), set(wanted) - set(found)
    body = script.partition("set -uo pipefail")[2]
    assert body.count("--preset=tiny") == 1 and body.count("srun ") >= 1 and "export CARD_WORLD_SIZE=16" in body
    assert "export SRUN_CPUS_PER_TASK=12" in body and "torchrun" not in body


def test_every_variable_has_its_reason_and_gives_way_to_the_users(capsys):
    script = printed(capsys, *TRAIN, "--interface=ib0", "--env=NCCL_DEBUG=INFO", "--env=MY=a b", "--print")
    lines = script.splitlines()
    for number, line in enumerate(lines):
        if match := re.match(r"export (\w+)=\$\{(\w+):-", line):
            assert match[1] == match[2] and lines[number - 1].startswith("# "), line
    assert "export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}" in lines and "export NCCL_DEBUG=INFO" in lines
    assert "export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-ib0}" in lines and "export MY='a b'" in lines
    on_a_cpu = printed(capsys, *TRAIN[:-1], "--gpus-per-node=0", "--ranks-per-node=4", "--print")
    assert "NCCL" not in on_a_cpu and "CUDA" not in on_a_cpu and "gpus" not in "".join(options_of(on_a_cpu))


def test_containers(capsys):
    image = ["--container=nvcr.io/x:1", "--mount=/data:/data"]
    pyxis = printed(capsys, *TRAIN, *image, "--print")
    assert '--container-image=nvcr.io/x:1 --container-mounts="$PWD:$PWD,/data:/data"' in pyxis and is_bash(pyxis)
    assert "activate" not in pyxis
    apptainer = printed(capsys, *TRAIN, *image, "--container-runtime=apptainer", "--print")
    assert 'apptainer exec --nv --bind="$PWD,/data:/data"' in apptainer and "--container-image" not in apptainer
    venv = printed(capsys, *TRAIN, "--venv=my venv", "--module=cuda/13", "--print")
    assert "source 'my venv'/bin/activate" in venv and "module load cuda/13" in venv
    remedy = r"run_dir=/elsewhere/x is not mounted .* --mount /elsewhere:/elsewhere"
    for mount in ("/data:/data", "/scratch:/elsewhere", "/elsewhere:/other"):  # the script looks for it from outside
        with pytest.raises(ConfigError, match=remedy):
            launch.run([*TRAIN, *image, f"--mount={mount}", "--run_dir=/elsewhere/x", "--print"])
    with pytest.raises(ConfigError, match=r"run_dir=\.\./x is not mounted"):
        launch.run([*TRAIN, *image, "--run_dir=../x", "--print"])
    printed(capsys, *TRAIN, *image, "--mount=/elsewhere:/elsewhere:rw", "--run_dir=/elsewhere/x", "--print")


def test_a_job_with_gpus_says_so_to_its_ranks(capsys):
    assert "\nexport CARD_GPUS_PER_NODE=8\n" in printed(capsys, *TRAIN, "--print")
    assert "CARD_GPUS" not in printed(capsys, *TRAIN[:-1], "--gpus-per-node=0", "--print")


def test_threads_are_one_where_there_are_ranks(capsys):
    assert "OMP_NUM_THREADS" in printed(capsys, *TRAIN, "--print")
    assert "OMP_NUM_THREADS" not in printed(capsys, "convert", "to-hf", "a", "b", "--print")


def test_arrays_fill_their_task_in(capsys):
    array = ["--array=1-3", "--seed={array}", "--run_dir=runs/seed_{array}"]
    script = printed(capsys, *TRAIN, *array, "--print")
    assert "--array=1-3" in options_of(script) and 'run_dir=runs/seed_"$SLURM_ARRAY_TASK_ID"' in script
    assert '--seed="$SLURM_ARRAY_TASK_ID"' in script
    with pytest.raises(ConfigError, match=r"all its tasks would train in run_dir=runs/x; give each .*runs/x_\{array\}"):
        launch.run([*TRAIN, "--array=1-3", "--print"])
    with pytest.raises(ConfigError, match=r"\{array\} stands for a task of --array, which is not given"):
        launch.run([*TRAIN, "--seed=1", "--run_dir=runs/{array}", "--print"])


def test_a_chain_is_ordered_by_name_and_does_not_requeue_at_its_limits(capsys):
    script = printed(capsys, *TRAIN, "--chain=3", "--time=10:00:00", "--print")
    assert "--dependency=singleton" in options_of(script) and "\nchain=yes\n" in script
    other = printed(capsys, *TRAIN, "--run_dir=other/x", "--chain=3", "--time=10:00:00", "--print")
    names = {options_of(text)[0] for text in (script, other)}
    assert len(names) == 2 and all(re.fullmatch(r"--job-name=x-[0-9a-f]{6}", name) for name in names), names
    watch = ["eval", "watch", "runs/x", "--gpus-per-node=1", "--chain=2", "--time=60", "--print"]
    assert "--dependency=singleton" in options_of(printed(capsys, *watch))


SBATCH = """#!/bin/bash
env > "$(dirname "$0")/environment"
n=$(wc -l < "$(dirname "$0")/jobs"); echo >> "$(dirname "$0")/jobs"
(( n < 2 )) || { echo "QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
echo $((n + 41))
"""
"""Takes two jobs, and no more: a site's limit, which a test cannot set up without accounting."""


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> Path:
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "jobs").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_knows_nothing_of_the_job_that_it_was_submitted_in(sbatch, monkeypatch):
    for name in ("SLURM_RESTART_COUNT", "SLURM_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CARD_WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    launch.run(["convert", "to-hf", "a", "b"])
    found = dict(line.partition("=")[::2] for line in (sbatch / "environment").read_text().splitlines())
    assert found["SLURM_CONF"] == "/etc/slurm.conf" and "PATH" in found
    assert not {name for name in found if name.startswith(("SLURM_", "CARD_"))} - {"SLURM_CONF"}
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(found)


def test_links_of_a_chain_that_wait_already_are_named_when_a_later_one_is_refused(sbatch):
    with pytest.raises(ConfigError, match=r"link 3 of --chain 4: .*MaxSubmit.*Queued already: 41 42; .*scancel 41 42$"):
        launch.run([*TRAIN, "--chain=4", "--time=10:00:00"])


def test_a_reader_that_has_read_enough_is_no_error(sbatch):
    command = f"{sys.executable} -m card_megatron launch convert to-hf a b | true; echo ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1])}
    done = subprocess.run(["bash", "-c", command], **dict(env=environment, capture_output=True, text=True, timeout=60))
    assert (done.stdout, done.stderr) == ("0\n", "") and (sbatch / "jobs").read_text() == "\n"


def test_preprocessing_gets_the_ranks_of_mpi(capsys):
    data = ["data", "build", "a b.jsonl", "--output=out", "--tokenizer=bytes", "--nodes=2", "--ranks-per-node=4"]
    for launcher, expected in (
        ("pmix", "srun --kill-on-bad-exit=1 --mpi=pmix --output="),
        ("pmi2", "srun --kill-on-bad-exit=1 --mpi=pmi2 --output="),
        ("mpirun", "mpirun -n 8 --map-by ppr:4:node"),
    ):
        script = printed(capsys, *data, f"--mpi={launcher}", "--print")
        assert expected in script and is_bash(script)
        assert "command=(card data build 'a b.jsonl' --output=out --tokenizer=bytes --mpi)" in script
    assert "--mpi" not in printed(capsys, *data[:5], "--print").partition("what runs")[2]


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.sbatch")))
def test_the_examples_are_what_the_command_prints_today(file, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parents[1])
    spec = importlib.util.spec_from_file_location("render", EXAMPLES / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    scripts = render.scripts()
    assert set(scripts) == {path.name for path in EXAMPLES.glob("*.sbatch")}
    assert (EXAMPLES / file).read_text() == scripts[file], "run `make docs`"
    assert is_bash(scripts[file])


# ---------------------------------------------------------------- ends, where there is no SLURM that could answer


def run_script(capsys, folder: Path, **commands: str) -> subprocess.CompletedProcess:
    """The script of a run, in a folder of its own, with these in the place of SLURM's commands."""
    script = printed(capsys, *TRAIN, "--venv=-", "--print")
    (folder / "bin").mkdir()
    for name, text in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "8", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_USER": "me"}
    system = {"PATH": f"{folder}/bin:/usr/bin:/bin", "SLURM_CONF": os.devnull, "BASH_FUNC_sleep%%": "() { :; }"}
    return subprocess.run(["bash"], input=script, env=job | system, capture_output=True, text=True, timeout=60)


def decision_of(capsys, folder: Path, srun: str) -> dict:
    """What it decides when `srun` is this and no controller answers."""
    done = run_script(capsys, folder, srun=srun)
    decision = json.loads((folder / "runs" / "x" / "restarts.jsonl").read_text())
    assert not decision["requeued"] and done.returncode == (decision["reason"] != "finished"), done.stdout + done.stderr
    return decision


def test_a_term_for_every_process_of_the_job_does_not_end_its_questions(capsys, tmp_path):
    """A lost node: SLURM ends the job by a TERM that reaches whatever the script has just started, too."""
    answer = "kill -TERM $PPID; echo ' JobState=COMPLETING Reason=NodeDown Restarts=1'"
    done = run_script(capsys, tmp_path, srun="exit 1", scontrol=answer)
    assert "SLURM requeues it at step 0" in done.stdout, done.stdout
    assert not (tmp_path / "runs" / "x" / "restarts.jsonl").exists(), "the next start says why"


@pytest.mark.parametrize(
    ("srun", "reason"),
    [
        ("exit 0", "SLURM does not answer"),
        ("exit 1", "SLURM does not answer"),
        ('touch "$CARD_FINISHED"', "finished"),
        (r"""printf 'a\tb "c"\n\e[31md\\' > "$CARD_REFUSED"; exit 1""", "refused: ab c [31md"),
    ],
)
def test_ends_of_a_run_without_an_answer_of_slurms(capsys, tmp_path, srun, reason):
    assert decision_of(capsys, tmp_path, srun)["reason"] == reason


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--preset=tiny"], "card launch train must know --gpus-per-node; 0 says that there are none"),
        (["eval", "--gpus-per-node=8"], "no options of `card eval` are given: what should it run"),
        ([*TRAIN, "--nodes=0"], "--nodes 0 must be at least 1"),
        ([*TRAIN, "--ranks-per-node=9"], "--ranks-per-node 9 would share 8 GPUs; .*--ranks-per-node 8"),
        ([*TRAIN, "--time=5"], "--time 5 leaves nothing before the save, which begins 300 s before its end"),
        ([*TRAIN, "--time=soon"], "--time soon is no time of SLURM's"),
        ([*TRAIN, "--chain=2"], "--chain 2 needs --time"),
        ([*TRAIN, "--nproc=2"], "--nproc 2 starts ranks on one machine; a job's are --nodes times --ranks-per-node"),
        ([*TRAIN, "--sbatch=nodes=4"], "--sbatch 'nodes=4': give it as --nodes"),
        ([*TRAIN, "--sbatch=N 4"], "'N 4' is not NAME or NAME=VALUE"),
        ([*TRAIN, "--env=PATH"], "--env 'PATH' is not NAME=VALUE"),
        ([*TRAIN, "--train.global_batchsize=4"], "unknown .*global_batchsize.*did you mean"),
        ([*TRAIN, "--parallel.tensor_model_parallel_size=3"], "tensor_model_parallel_size=3"),
        (["convert", "to-hf", "a", "b", "--nodes=2"], "convert is one process, not 2"),
        (["eval", "runs/x", "--gpus-per-node=8", "--time=60", "--chain=2"], "--chain 2: its jobs would do eval again"),
        ([*TRAIN, "--mount=/a:/a"], "--mount /a:/a needs --container IMAGE"),
        ([*TRAIN, "--sbatch=ntasks=4"], "'ntasks=4': ranks are --nodes times --ranks-per-node"),
        ([*TRAIN, "--sbatch=gpus=4"], "'gpus=4': give it as --gpus-per-node"),
        ([*TRAIN, "--sbatch=gres=gpu:8"], "'gres=gpu:8': give it as --gpus-per-node"),
        ([*TRAIN, "--sbatch=gpus-per-task=1"], "give it as --gpus-per-node"),
        ([*TRAIN, "--sbatch=chdir=/tmp"], "relative to the folder of submission: submit it from there"),
        ([*TRAIN, "--sbatch=open-mode=truncate"], "it is append"),
        ([*TRAIN, "--array=abc", "--run_dir=runs/{array}"], "--array abc is not a list of tasks such as 0-7"),
        ([*TRAIN, "--container=x", "--venv=y"], "--venv y and --container x: give one of them"),
    ],
)
def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(arguments, message):
    with pytest.raises(ConfigError, match=message):
        launch.run([*arguments, "--print"])


def test_without_sbatch_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not here; submit on a login node of the cluster"):
        launch.run(TRAIN)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("1-0:0:5", 86405),
        ("UNLIMITED", None),
    ],
)
def test_times_are_slurms(time, seconds):
    assert seconds_of(time) == seconds


def test_options_pass_through():
    assert parse_options(["--mail-type=END", "exclusive", "gres=nvme:1"]) == {
        "mail-type": "END",
        "exclusive": None,
        "gres": "nvme:1",
    }
    assert Job("convert", ["to-hf"], "c", options={"mem": "64G"}).sbatch_options()["mem"] == "64G"


# ---------------------------------------------------------------- layouts

LAYOUTS = {
    "tp2 pp2": ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "tp2 cp2": ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2),
    "ep2 pp2": ParallelConfig(expert_model_parallel_size=2, pipeline_model_parallel_size=2),
    "dp4": ParallelConfig(),
}


def megatrons_own(layouts: dict[str, ParallelConfig]) -> dict[str, dict[str, int]]:
    """This rank's coordinates in every layout, from Megatron's groups as they are made in training."""
    from megatron.core import parallel_state

    from card_megatron.platform import model_parallel, ranks_from_environment

    found = {}
    for name, parallel in layouts.items():
        with model_parallel(ranks_from_environment(), parallel):
            found[name] = {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "cp": parallel_state.get_context_parallel_rank(),
                "dp": parallel_state.get_data_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
                "ep": parallel_state.get_expert_model_parallel_rank(),
            }
    return found


def test_the_layout_is_the_one_that_megatron_makes():
    ranks = run_distributed(megatrons_own, 4, LAYOUTS)
    for name, parallel in LAYOUTS.items():
        for place in places(groups_of(parallel, 4), 2):
            theirs = ranks[place.rank][name]
            assert place.coordinates == {kind: theirs[kind] for kind in place.coordinates}, (name, place.rank)
            assert (place.node, place.local_rank) == divmod(place.rank, 2)
            assert "ep" in place.coordinates or theirs["ep"] == 0


def test_the_table_has_a_line_a_rank_and_says_what_crosses_nodes():
    groups = groups_of(ParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=2), 16)
    lines = table(places(groups, 8)).splitlines()
    assert lines[0].split() == ["node", "rank", "local", "tp", "cp", "dp", "pp"] and lines[9] == ""
    assert lines[10].split() == ["1", "8", "0", "0", "0", "0", "1"] and len(lines) == 18
    assert crossings(groups, 8) == [
        "tensor-parallel groups of 4: inside a node",
        "data-parallel groups of 2: inside a node",
        "pipeline-parallel groups of 2: over 2 nodes",
    ]
    assert "WITHOUT NVLink" in crossings(groups, 2)[0]


def test_a_dry_run_shows_the_layout_and_submits_nothing(capsys):
    shown = printed(capsys, *TRAIN, "--parallel.tensor_model_parallel_size=4", "--dry-run")
    assert "2 nodes x 8 ranks = 16" in shown and "tensor-parallel groups of 4: inside a node" in shown
    assert f"--comment=card:{Path('runs/x').absolute()}" in shown
