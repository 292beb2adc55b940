"""Pages of K and V: who holds them (block_pool), who may share them (prefix), memory (pool)."""
