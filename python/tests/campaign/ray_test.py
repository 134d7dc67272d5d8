"""`lockstep campaign --ray` on a real Ray cluster of this machine. Exit status 77: Ray is missing.

It needs an interpreter with Ray: this one, or that of $LOCKSTEP_PYTHON.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from processes import processes

LOCKSTEP = os.environ.get("LOCKSTEP", "")
SKIPPED = 77
RUNS = ("fuzz", "--backend", "none", "--runs", os.environ.get("LOCKSTEP_RAY_RUNS", "12000"))
SHARD = 500


class RayCampaign(unittest.TestCase):
    def wait_for_shard(self, number: int) -> tuple[int, int]:
        """The Ray worker that runs it, and that worker's raylet."""
        words = f"--seed {number * SHARD + 1} --runs {SHARD}"
        for _ in range(6000):
            running = processes()
            for parent, line in running.values():
                if words in line and "ray::" in running.get(parent, (0, ""))[1]:
                    return parent, running[parent][0]
            time.sleep(0.01)
        self.fail(f"shard {number} did not start")

    def test_a_cluster_that_loses_and_gains_workers_reports_as_one_process(self) -> None:
        from ray.cluster_utils import Cluster

        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        folder = Path(holder.name)
        whole, spread = folder / "whole.json", folder / "spread.json"
        subprocess.run([LOCKSTEP, *RUNS, "--json", whole], capture_output=True, check=True)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        self.addCleanup(cluster.shutdown)
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        command = [LOCKSTEP, "campaign", "--ray", cluster.address, "--out", str(folder),
                   "--shard-cases", str(SHARD), *RUNS, "--json", str(spread)]  # fmt: skip
        print("$", *command, flush=True)
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"LOCKSTEP_PYTHON": sys.executable})  # fmt: skip
        self.addCleanup(process.kill)
        worker, _ = self.wait_for_shard(7)
        os.kill(worker, signal.SIGKILL)
        print(f"SIGKILL to Ray's worker {worker}, which ran shard 7", flush=True)
        raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes}
        for number in range(10, 20):
            worker, raylet = self.wait_for_shard(number)
            if raylet in raylets:
                os.kill(raylet, signal.SIGKILL)
                os.kill(worker, signal.SIGKILL)
                print(f"SIGKILL to a machine, which ran shard {number}", flush=True)
                break
        cluster.add_node(num_cpus=1)
        print("a machine joins", flush=True)
        out, err = process.communicate()
        print(err, out, sep="\n", flush=True)
        self.assertEqual(process.returncode, 0)
        self.assertGreaterEqual(err.count(" runs again: "), 2)
        self.assertEqual(spread.read_bytes(), whole.read_bytes())
        print("The report equals that of one process, byte for byte.")


if __name__ == "__main__":
    if importlib.util.find_spec("ray") is None:
        other = os.environ.get("LOCKSTEP_PYTHON", "python3")
        if subprocess.run([other, "-c", "import ray"], capture_output=True).returncode:
            print("SKIPPED: no Ray (pip install ray)")
            sys.exit(SKIPPED)
        os.execvp(other, [other, *sys.argv])
    unittest.main()
