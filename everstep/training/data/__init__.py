"""Data that a restart resumes: which loaders are resumed how, and datasets that are resumable by construction.

`init` accepts these loaders. After a restart, each continues with the batch that an undisturbed run would read next:

    loader                                          resumed by
    torch DataLoader over a map-style dataset       advancing its batch sampler without fetching
    torch DataLoader over `ShardedFiles`            the number of the next batch
    torch DataLoader over another iterable dataset  the states of the dataset and of its workers, if the dataset has
                                                    state_dict and load_state_dict; otherwise by replaying
    anything else with state_dict and               its own state
        load_state_dict
    list, tuple                                     skipping
    any other iterable                              replaying the epoch's batches, with a warning
    an iterator, a generator                        rejected: it can be read only once

torchdata's `StatefulDataLoader` is resumed as a torch DataLoader. A streaming dataset of Hugging Face `datasets` is
resumed by its state, unless this state is not exact (`hugging_face`). Such a dataset is replayed.

**Another number of ranks.** torch's `DistributedSampler` and `ShardedFiles` put all samples of an epoch into one order
and distribute them to the ranks in turn. A launch with another number of ranks continues after the last sample that any
rank received. No sample is dropped or repeated. Such a launch rejects loaders without an order over all ranks.

Invariant: an undisturbed run and a resumed run yield the same batches and leave all generators in the same state.
"""

from everstep.training.data.blocks import ShuffledBlocks
from everstep.training.data.files import ShardedFiles
from everstep.training.data.seeded import SeededCollator, SeededDataset
from everstep.training.data.streams import DataStream, check_apart

__all__ = ["DataStream", "SeededCollator", "SeededDataset", "ShardedFiles", "ShuffledBlocks", "check_apart"]
