"""Training steps of a ranking model: embedding tables, a transformer encoder and a click loss, under FSDP2."""

from .workload import RankingWorkload as RankingWorkload
