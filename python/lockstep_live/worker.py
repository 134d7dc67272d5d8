"""vLLM's worker with a check of its pages.

`--worker-cls lockstep_live.worker.PageCheckedWorker`; docs/recorder.md.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from lockstep_live.live_log import LockstepViolation
from lockstep_live.pages import Group, PageCheck, PageCheckError, Pages, Tables
from lockstep_live.settings import SettingsError, mode_of, num_pages_of

logger = logging.getLogger("vllm.lockstep_live")


def _views(worker: Any, kv_cache_config: Any) -> Any:
    """(layer, tensor) of every cache on this worker's device."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            cache = getattr(layers.get(name), "kv_cache", None)
            for view in cache if isinstance(cache, (list, tuple)) else (cache,):
                if view is not None and view.numel() and view.device.type == worker.device.type:
                    yield name, view


def page_check_of(worker: Any, kv_cache_config: Any, num_pages: int, report: Any) -> PageCheck:
    """Raises PageCheckError."""
    config = worker.vllm_config
    if config.kv_transfer_config is not None:
        raise PageCheckError("a KV connector writes pages when it likes")
    ranks = config.parallel_config
    if getattr(ranks, "decode_context_parallel_size", 1) * getattr(
        ranks, "prefill_context_parallel_size", 1
    ) > 1:  # fmt: skip
        raise PageCheckError("ranks of context parallelism hold parts of a block's tokens")
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors or not hasattr(tensors[0], "block_stride"):
        raise PageCheckError("this release of vLLM gives groups memory of their own")
    if any(getattr(group, "host_resident", False) for group in kv_cache_config.kv_cache_groups):
        raise PageCheckError("a group's blocks are in the host's memory")
    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    ahead = drafts if config.scheduler_config.async_scheduling else 0
    groups = [Group.of(group) for group in kv_cache_config.kv_cache_groups]
    num_blocks = kv_cache_config.num_blocks
    pages = Pages(_views(worker, kv_cache_config), num_blocks)
    return PageCheck(pages, Tables(groups, drafts, ahead), num_blocks, num_pages, report)


class PageChecks:
    """Goes in front of a worker in the order of base classes."""

    page_check: PageCheck | None = None
    _violation = ""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        environment = dict(os.environ)
        try:
            if mode_of(environment) != "off":
                num_pages = num_pages_of(environment)
                report = self._report_page
                self.page_check = page_check_of(self, kv_cache_config, num_pages, report)
        except (PageCheckError, SettingsError) as error:
            if environment.get("LOCKSTEP") == "raise":
                raise
            logger.error("lockstep: no page is checked: %s", error)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.page_check is not None:
            self.page_check.before_step(scheduler_output)
            if self._violation and os.environ.get("LOCKSTEP") == "raise":
                raise LockstepViolation(self._violation)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sleep(self, *args: Any, **options: Any) -> Any:
        if self.page_check is not None:
            self.page_check.forget()
        return super().sleep(*args, **options)  # type: ignore[misc]

    def shutdown(self) -> None:
        check, self.page_check = self.page_check, None
        if check is not None:
            check.finish()
            logger.warning(
                "lockstep: %d steps, %d pages compared, %d changed",
                check.steps, check.compared, check.num_found,
            )  # fmt: skip
        super().shutdown()  # type: ignore[misc]

    def _report_page(self, line: str) -> None:
        self._violation = self._violation or line
        logger.error("lockstep: %s", line)


class PageCheckedWorker(PageChecks, Worker):
    """For --worker-cls."""
