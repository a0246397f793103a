"""A real Slurm cluster on this machine: munge, a controller and two nodes, all in one folder.

It uses Debian's packages (`slurmctld slurmd slurm-client munge`) and touches nothing in /etc.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")
START_SECONDS = 30.0
CONFIGURATION = """\
ClusterName=memconsole
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
MinJobAge=20
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={first} CPUs={cpus} RealMemory={mebibytes} State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={second} CPUs={cpus} RealMemory={mebibytes} State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in PROGRAMS if _program(name) is None]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """The daemons of one cluster, as processes of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to talk to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons. Returns once both nodes are idle. Raises `TimeoutError`."""
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        controller, first, second = _free_ports(3)
        text = CONFIGURATION.format(
            user=getpass.getuser(),
            folder=self.folder,
            controller=controller,
            first=first,
            second=second,
            host=socket.gethostname().split(".")[0],
            cpus=os.cpu_count() or 1,
            mebibytes=psutil.virtual_memory().total >> 20,
        )
        (self.folder / "slurm.conf").write_text(text)
        folder = self.folder
        files = [f"--{name}={folder}/munge.{name[:4]}" for name in ("pid-file", "seed-file")]
        self._run(
            "munged",
            *("--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--log-file={folder}/munged.log", *files),
        )
        self._until(lambda: (folder / "munge.socket").exists(), "munged does not start")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self._until(lambda: self.idle_nodes() == len(NODES), "the nodes do not come up")

    def start_controller(self) -> None:
        self._run("slurmctld", "-D", name="slurmctld")
        self._until(self._answers, "slurmctld does not answer")

    def start_node(self, node: str) -> None:
        self._run("slurmd", "-D", "-N", node, name=node)

    def kill(self, name: str) -> None:
        """SIGKILL the controller (`slurmctld`) or a node's daemon (`n1`, `n2`)."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End every daemon, and every job that still runs."""
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            self.ask("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
            time.sleep(0.5)
        for name in reversed(list(self._processes)):
            process = self._processes.pop(name)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, *command: str) -> str:
        """The output of a client's command. Raises `subprocess.SubprocessError`."""
        answer = subprocess.run(
            command,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return answer.stdout

    def idle_nodes(self) -> int:
        with contextlib.suppress(subprocess.SubprocessError):
            return self.ask("sinfo", "-h", "-N", "-o", "%t").split().count("idle")
        return 0

    def _answers(self) -> bool:
        with contextlib.suppress(subprocess.SubprocessError):
            return "UP" in self.ask("scontrol", "ping")
        return False

    def _run(self, program: str, *arguments: str, name: str = "") -> None:
        path = _program(program)
        assert path is not None, f"{program} is not installed"
        with open(self.folder / f"{name or program}.out", "ab") as output:
            self._processes[name or program] = subprocess.Popen(
                [path, *arguments],
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _until(self, done: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem}; see {self.folder}")
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A running cluster in `folder`."""
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
