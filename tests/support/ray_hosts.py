"""A cluster of Ray nodes on this machine in a process of its own, whose hosts are killed and come back on request."""

import contextlib
import json
import os
import subprocess
import sys

import psutil
from harness import PATIENCE_S, REPO, SUPPORT, poll


class RayHosts:
    """Starts the process; its environment has what a run needs to join (``RAY_...``)."""

    def __init__(self, hosts):
        self.process = subprocess.Popen([sys.executable, __file__, str(hosts)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, process_group=0,
                                        env={**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{SUPPORT}"})  # fmt: skip
        told = self._line()
        self.address, self.environment = told["address"], told["environment"]

    def _line(self):
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the cluster ended")

    def ask(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self, index):
        """SIGKILL of a host's raylet."""
        psutil.Process(self.ask(f"pid {index}")["pid"]).kill()

    def gateways(self):
        """The living processes of gateways."""
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.name().startswith("ray::Gateway"):
                        found.append(process)
        return found

    def samplers(self):
        """The living samplers of all hosts."""
        found = []
        for gateway in self.gateways():
            with contextlib.suppress(psutil.Error):
                found += [child for child in gateway.children() if child.name().startswith("sampler-")]
        return found

    def listening(self):
        """Addresses at which the cluster's processes listen."""
        found = set()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found |= {link.laddr.ip for link in process.net_connections("inet") if link.status == "LISTEN"}
        return found

    def close(self):
        with contextlib.suppress(psutil.Error, OSError):
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_S)
            for process in [*family, psutil.Process(os.getpid())][:-1]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def ray_hosts(count):
    made = RayHosts(count)
    try:
        yield made
    finally:
        made.close()


def gone(processes):
    """Waits until all of these have ended."""
    poll(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes),
         what=lambda: f"the end of {[process for process in processes if process.is_running()]}")  # fmt: skip


def raylet_pid(cluster, index):
    """Process id of a host's raylet, whose death is the host's."""
    return int(cluster.hosts[index].all_processes["raylet"][0].process.pid)


def forget_host(cluster, index):
    """Forgets a host whose raylet was killed, and ends what is left of it."""
    cluster._cluster.remove_node(cluster.hosts.pop(index), allow_graceful=False)


def main():
    from spreeze.runtime.cluster.ray_nodes import LocalCluster

    def tell(**facts):
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    cluster = LocalCluster(int(sys.argv[1]))
    environment = {key: value for key, value in os.environ.items() if key.startswith("RAY_")}
    tell(address=cluster.address, environment=environment)
    for line in sys.stdin:
        word, *index = line.split()
        if word == "pid":
            tell(pid=raylet_pid(cluster, int(index[0])))
        elif word == "add":
            cluster.add()
            tell(done=True)
        elif word == "remove":
            forget_host(cluster, int(index[0]))
            tell(done=True)
    cluster.close()


if __name__ == "__main__":
    main()
