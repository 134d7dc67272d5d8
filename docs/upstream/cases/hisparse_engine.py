"""HiSparse's groups beside a connector that loads, in vLLM's MultiConnector. A worker does in each
step all that it is told."""

import torch
from small_engine import SmallEngine
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1 import kv_cache_interface as kv

BLOCK = 4
RESIDENT = 2  # the group of pages on the device


class HiSparseEngine(SmallEngine):
    """Four blocks on the host and 39 on the device; `loads`: tokens that are loaded, by request."""

    def __init__(self, loads, loads_async, **options):
        rows = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": torch.bfloat16}
        page = {"block_size": BLOCK, "page_size": BLOCK * 576 * 2}
        specs = [
            kv.MLAAttentionSpec(head_size=576, **rows),
            kv.MLAAttentionSpec(head_size=132, **rows),
            kv.HiSparseResidentSpec(**page),
            kv.HiSparseHotSpec(blocks_per_request=1, **page),
        ]
        super().__init__(
            specs, num_blocks=39, num_host_blocks=4, max_model_len=12, loads=loads,
            loads_async=loads_async, scheduler_reserve_full_isl=True, **options,
        )  # fmt: skip

    def told(self, step):
        """What HiSparse's worker is told in the step."""
        return step.kv_connector_metadata.metadata[0]

    def update(self, step, **output):
        done = {move.transfer_id: 1 for move in self.told(step).command.page_transfers}
        worker = HiSparseConnectorWorkerMetadata(enqueued_transfer_counts=done,
                                                 completed_transfer_counts=done)  # fmt: skip
        both = MultiKVConnectorWorkerMetadata(metadata=(worker, None))
        return super().update(step, worker=both, **output)
