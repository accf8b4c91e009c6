"""Weights of one layout moved into another: from the trainer into the rollout.

Everyday use is :func:`megapg.slices_of` and :class:`megapg.Refit`. The modules, in the order in
which data flows:

* ``slices``: the slices of a rank as plain data, with a JSON form;
* ``places``: the slices of a Megatron-core model, from its own ``sharded_state_dict``;
* ``of_model``: :func:`megapg.slices_of`: of these, of a torch module, or of plain tensors;
* ``moves``: the plan, from the slices of all ranks: which rank sends which box to which rank;
* ``rounds``: the plan cut into rounds that fit into a buffer;
* ``exchange``: :class:`megapg.Refit`, which carries the plan out over a process group;
* ``llama``: the names of Hugging Face's Llama and its relatives.
"""
