"""Counts what is added to and removed from the prefix cache, where it happens.

vLLM's own cache events would say the same, but building one costs a copy of the block's tokens.
"""

from typing import Any


class CacheCounter:
    """Hashes stored and evicted since take() was last called."""

    def __init__(self, block_pool: Any, hash_movers: tuple[str, ...]) -> None:
        self._pool = block_pool
        self._table: Any = None  # the one that is watched
        self._stored = 0
        self._evicted = 0
        for name in hash_movers:
            self._leave_uncounted(name)
        self.watch()

    def watch(self) -> None:
        """Counts on the pool's present table; a reset of the prefix cache makes a new one."""
        table = self._pool.cached_block_hash_to_block
        if table is self._table:
            return
        self._table = table
        insert, pop = table.insert, table.pop

        def counted_insert(key: Any, block: Any) -> None:
            self._stored += 1
            insert(key, block)

        def counted_pop(key: Any, block_id: int) -> Any:
            block = pop(key, block_id)
            if block is not None:
                self._evicted += 1
            return block

        table.insert, table.pop = counted_insert, counted_pop

    def _leave_uncounted(self, name: str) -> None:
        mover = getattr(self._pool, name)

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            counts = self._stored, self._evicted
            try:
                return mover(*args, **kwargs)
            finally:
                self._stored, self._evicted = counts

        setattr(self._pool, name, uncounted)

    def take(self) -> tuple[int, int]:
        """(stored, evicted) since the last call."""
        counts = self._stored, self._evicted
        self._stored = self._evicted = 0
        return counts

    def seen(self) -> tuple[int, int]:
        """(stored, evicted) since the last take()."""
        return self._stored, self._evicted

    def forget_since(self, counts: tuple[int, int]) -> None:
        """Counts go back to what seen() returned: what came since belongs to no step."""
        self._stored, self._evicted = counts
