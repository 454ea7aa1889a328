"""Makes data loaders resumable: chooses how each kind of loader is resumed, and provides datasets made for resuming.

`init` accepts these loaders. After a restart, each loader continues with the batch that an uninterrupted run would read
next:

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

Replaying means to read the epoch from its beginning again and drop the batches that the script already received.
torchdata's `StatefulDataLoader` is resumed like a torch DataLoader. A streaming dataset of Hugging Face `datasets` is
resumed by its own state if this state restores the position exactly (`hugging_face`), and otherwise replayed.

**A different number of ranks.** torch's `DistributedSampler`, accelerate and `ShardedFiles` put all samples of an epoch
into one order, and the ranks read it in turn. The position of a job in this order is one number. A launch with a
different number of ranks begins there, and shares the rest of the epoch equally (`shares`). A launch with a different
number of ranks rejects all other loaders, because their samples have no order over all ranks.

Invariant: a resumed run yields the same batches as an uninterrupted run, and leaves all random generators in the same
states.
"""

from everstep.training.data.blocks import ShuffledBlocks
from everstep.training.data.files import ShardedFiles
from everstep.training.data.seeded import SeededCollator, SeededDataset
from everstep.training.data.streams import DataStream, check_apart

__all__ = ["DataStream", "SeededCollator", "SeededDataset", "ShardedFiles", "ShuffledBlocks", "check_apart"]
