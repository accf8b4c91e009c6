"""The traffic of real training steps, counted on gloo ranks."""

from real_step import Case

CASES = [
    # tensor and sequence parallelism
    Case(2, tp=2),
    Case(4, tp=4, microbatches=2),
    Case(2, tp=2, sequence_parallel=True),
    Case(2, tp=2, sequence_parallel=True, recompute="full"),
    Case(2, tp=2, recompute="selective", microbatches=3),
    # pipelines
    Case(2, pp=2, microbatches=4),
    Case(2, pp=2, microbatches=2, tied=False, recompute="full"),
    Case(4, pp=4, microbatches=4, learned_positions=True),
    Case(2, pp=2, vpp=2, microbatches=4),
    Case(4, pp=4, vpp=2, layers=8, microbatches=4, tied=False),
    # data parallelism
    Case(2),
    Case(2, distributed_optimizer=False),
    Case(2, bf16=False, micro_batch_size=2),
    # together
    Case(8, tp=2, pp=2, microbatches=2),
    Case(8, tp=2, pp=2, sequence_parallel=True, microbatches=2, distributed_optimizer=False),
    Case(4, tp=2, tied=False, recompute="selective"),
    # experts
    Case(2, ep=2, experts=4),
    Case(2, ep=2, experts=4, dispatcher="allgather", tied=False),
    Case(4, ep=4, experts=8, recompute="full"),
    Case(4, ep=4, experts=4, top_k=1, dispatcher="allgather", distributed_optimizer=False),
    Case(4, tp=2, sequence_parallel=True, ep=2, experts=4, expt_tp=1),
    Case(4, tp=2, sequence_parallel=True, ep=2, experts=4, expt_tp=1, dispatcher="allgather"),
    Case(4, tp=2, sequence_parallel=True, ep=2, experts=4),
    Case(4, tp=2, sequence_parallel=True, ep=2, experts=4, dispatcher="allgather"),
    Case(4, ep=2, pp=2, experts=4, microbatches=2),
]
