"""vLLM's plugin: every process of an engine calls register() before it makes a scheduler."""

from __future__ import annotations

import logging
import os

from lockstep_live.settings import SettingsError, mode_of

logger = logging.getLogger("vllm.lockstep_live")


def register() -> None:
    """Attaches the live check to the configured scheduler; does nothing when $LOCKSTEP is off.
    May be called twice."""
    try:
        mode = mode_of(dict(os.environ))
    except SettingsError as error:
        logger.error("lockstep: nothing is checked: %s", error)
        return
    if mode == "off":
        return
    from vllm.config import SchedulerConfig

    configured = SchedulerConfig.get_scheduler_cls
    if getattr(configured, "is_live", False):
        return

    def get_scheduler_cls(self):  # type: ignore[no-untyped-def]
        from lockstep_live.scheduler import live_class

        return live_class(configured(self))

    get_scheduler_cls.is_live = True  # type: ignore[attr-defined]
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    logger.info("lockstep: decisions are audited (LOCKSTEP=%s)", mode)
