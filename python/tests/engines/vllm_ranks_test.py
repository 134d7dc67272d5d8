"""vLLM's own rules of data parallel ranks against the table that the model's test also reads.

tests/sim/ranks/vllm_ranks.json has loads of ranks, and for each release the rank that a new request
goes to, the steps of a wave in which ranks vote, and the rows that they exchange before a step.
`--write` sets the entries of the installed release. Skipped, with exit status 77, where vLLM cannot
be imported.
"""

from __future__ import annotations

import json
import sys
import unittest
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from installed_vllm import vllm_engine
from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.worker import dp_utils as first_runner
from vllm.v1.worker.gpu import dp_utils as second_runner

TABLE = Path(__file__).resolve().parents[3] / "tests" / "sim" / "ranks" / "vllm_ranks.json"
RELEASE = f"vllm-{vllm_engine.VERSION}"
TWO = {"data_parallel_size": 2, "data_parallel_rank": 0}


def ranks_of(sequence: list[Any]) -> list[int]:
    """The rank of each request, by the client's function. `sequence` has its loads."""
    ranks = list(range(len(sequence[0])))
    client = SimpleNamespace(
        core_engines=ranks,
        client_count=1,
        eng_start_index=0,
        reqs_in_flight={},
        streaming_reqs=set(),
    )
    chosen = []
    for number, loads in enumerate(sequence):
        has_usage = RELEASE != "vllm-0.22.1"
        client.lb_engines = [[load[0], load[1]] + load[3:] * has_usage for load in loads]
        client.engine_inflight = Counter({rank: loads[rank][2] for rank in ranks})
        request = SimpleNamespace(
            request_id=str(number), data_parallel_rank=None, pooling_params=None, resumable=False
        )
        chosen.append(DPLBAsyncMPClient.get_core_engine_for_request(client, request))
    return chosen


def voting_steps() -> list[int]:
    voted: list[int] = []
    config = mock.Mock(sync_dp_state=lambda *_, **__: (voted.append(engine.step_counter), False))
    engine = SimpleNamespace(
        step_counter=0, dp_group=None, pending_pause=False, vllm_config=mock.Mock()
    )
    engine.vllm_config.parallel_config = config
    engine.dp_sync_interval = getattr(ParallelConfig(), "dp_sync_interval", None)
    with mock.patch.object(ParallelConfig, "sync_dp_state", config.sync_dp_state):
        for _ in range(64):
            DPEngineCoreProc._has_global_unfinished_reqs(engine, True)
    return voted


def rows_exchanged() -> int:
    rows: list[int] = []
    reduced = mock.Mock(side_effect=lambda tensor, **_: rows.append(len(tensor)))
    group = mock.Mock(device=torch.device("cpu"), cpu_all_reduce_=reduced)
    with mock.patch("torch.distributed.all_reduce", reduced):
        if RELEASE == "vllm-0.22.1":  # later releases: model runner V2
            config = SimpleNamespace(**TWO, disable_nccl_for_dp_synchronization=True)
            with mock.patch.object(first_runner, "get_dp_group", lambda: group):
                first_runner._run_ar(False, 1, 1, 0, config)
        else:
            no_graph = SimpleNamespace(cg_mode=CUDAGraphMode.NONE, num_active_loras=0)
            with mock.patch.object(second_runner, "get_dp_group", lambda: group):
                second_runner.sync_cudagraph_and_dp_padding(None, no_graph, 1, 1, None, 2, 0)
    return rows[0]


def of_this_release(table: dict[str, Any]) -> dict[str, Any]:
    return {
        "ranks": [ranks_of(sequence) for sequence in table["loads"]],
        "votes": voting_steps(),
        "rows": rows_exchanged(),
    }


def text_of(table: dict[str, Any]) -> str:
    """JSON with a line per sequence."""
    loads = ",\n  ".join(map(json.dumps, table["loads"]))
    releases = ",\n  ".join(f'"{name}": {json.dumps(of)}' for name, of in table["releases"].items())
    about = json.dumps(table["about"])
    return f'{{"about": {about},\n "loads": [\n  {loads}],\n "releases": {{\n  {releases}}}}}\n'


class RanksTest(unittest.TestCase):
    def test_requests_votes_and_exchanges_are_those_of_the_table(self) -> None:
        table = json.loads(TABLE.read_text())
        if RELEASE not in table["releases"]:
            self.skipTest(f"the table has no {RELEASE}")
        self.assertEqual(of_this_release(table), table["releases"][RELEASE])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        table = json.loads(TABLE.read_text())
        table["releases"][RELEASE] = of_this_release(table)
        TABLE.write_text(text_of(table))
        sys.exit()
    unittest.main()
