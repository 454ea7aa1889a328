"""Programs of the nodes and ranks of the durable benchmark.

node.py       one node: Everstep's class `Member` without a control plane model.py      the model and its training step,
divided among the ranks by FSDP2 uploading.py  a rank that trains while a checkpoint is stored, by Everstep or by DCP
loading.py    a rank that restores a step of an earlier generation, which may have had a different number of ranks
"""
