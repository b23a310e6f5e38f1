"""Reading shards block by block: what is needed when, what is fetched, held and evicted.

``block_reader`` is what workers ask for samples; ``schedule`` and ``block_table`` decide, without threads;
``block_sources`` reads blocks, ``block_bytes`` fetches their bytes.
"""
