"""Small trainers of transformers and TRL, attached to Everstep. The tests of the integration kill and resume them.

The models have dropout, the collator of GPT-2 masks random tokens, and the trainers log and evaluate between steps.
Each of these draws random numbers in the training process.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.integration.training import replayed
from tests.integration.training.faults import reach

TOKENS, LENGTH, SAMPLES = 37, 8, 44
"""Size of the vocabulary, tokens per sample, and number of samples. An epoch ends within an accumulation."""


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Random tokens from a fixed seed.

    Args:
        is_ragged: True if the samples have different lengths.
    """

    def __init__(self, is_ragged: bool = False) -> None:
        self.tokens = torch.randint(TOKENS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))
        self._is_ragged = is_ragged

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = LENGTH - index % 4 if self._is_ragged else LENGTH
        return {"input_ids": self.tokens[index, :length]}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The samples of `Samples` as an iterable data set, so that a loader does not know their number."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        samples = Samples()
        return (samples[index] for index in range(SAMPLES))


def mask(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples and replace random tokens, with torch's generator of the process."""
    tokens = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    masked = torch.where(torch.rand(tokens.shape) < 0.2, torch.zeros_like(tokens), tokens)
    return {"input_ids": masked, "labels": tokens}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2))


def with_adapters(model: Any, target: str) -> Any:
    """Freeze a model and add LoRA adapters with dropout."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=[target]))


TUNERS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 4, "deltaT": 1, "total_step": 12},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 8},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 1},
    "OFT": {"oft_block_size": 4, "r": 0},
    "POLY": {"n_tasks": 1, "n_skills": 2},
    "ROAD": {"group_size": 4},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5], "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 4, "num_vectors": 8, "topk": 2},
    "WAVEFT": {"n_frequency": 8},
}
"""Types of PEFT's tuners that need options, with these options."""
SIMPLE_TUNERS = (
    "BEFT",
    "CARTRIDGE",
    "DEFT",
    "DELORA",
    "FROD",
    "GLORA",
    "HIRA",
    "HRA",
    "LILY",
    "LOHA",
    "LOKR",
    "LORA",
    "MISS",
    "OSF",
    "PEANUT",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "PSOFT",
    "PVERA",
    "P_TUNING",
    "RANDLORA",
    "SHIRA",
    "SUPERTUNING",
    "TINYLORA",
    "UNILORA",
    "VERA",
)
"""Types of PEFT's tuners that need no options."""


def _with_tuner(kind: str) -> Any:
    import dataclasses

    from peft import PeftType, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]
    usual = {"target_modules": ["q_proj", "v_proj"], "r": 2, "rank": 2, "num_virtual_tokens": 2}
    fields = {field.name for field in dataclasses.fields(known)}
    options = {name: value for name, value in usual.items() if name in fields} | TUNERS.get(kind, {})
    if kind == "ADALORA":
        options.pop("r", None)
    return get_peft_model(llama(), known(task_type="CAUSAL_LM", **options))


def _with_tasks(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples of the only task, which some tuners need."""
    return {**mask(samples), "task_ids": torch.zeros(len(samples), dtype=torch.long)}


def make_trainer(kind: str, args: dict[str, Any], options: dict[str, Any], callbacks: list[Any]) -> Any:
    """Create the trainer of one kind: `gpt2`, `t5`, `sft`, a key of `PREFERENCES`, or a type of adapters of PEFT."""
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    if copies := options.get("copies"):
        shards = int(os.environ["WORLD_SIZE"]) // copies
        args["parallelism_config"] = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards)
    if kind == "sft":
        return _sft(args, options, callbacks)
    if "tuner" in options:
        collate = _with_tasks if options["tuner"] in ("MULTITASK_PROMPT_TUNING", "POLY") else mask
        args = {**args, "remove_unused_columns": False, "label_names": ["labels"], "learning_rate": 0.1}
        return Trainer(
            _with_tuner(options["tuner"]), TrainingArguments(**args), collate, Samples(), callbacks=callbacks
        )
    if kind in PREFERENCES:
        return _of_preferences(kind, args, callbacks)
    if kind == "t5":
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        arguments = Seq2SeqTrainingArguments(**args, predict_with_generate=True, generation_max_length=4)
        data = Samples()
        return Seq2SeqTrainer(T5ForConditionalGeneration(config), arguments, mask, data, data, callbacks=callbacks)
    model = with_adapters(gpt2(), "c_attn") if kind == "lora" else gpt2()
    data = Stream() if options.get("streams") else Samples(options.get("ragged", False))
    return Trainer(model, TrainingArguments(**args), mask, data, Samples(), callbacks=callbacks)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {**{f"<{name}>": number for number, name in enumerate(("pad", "eos", "unk"))}}
    words |= {f"w{number}": number for number in range(len(words), TOKENS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(kind: str = "LlamaForCausalLM") -> Any:
    """Return a small model of Llama, read from files as TRL's trainers read their second models."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
        max_position_embeddings=2 * LENGTH,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        num_labels=1,
    )
    model = getattr(transformers, kind)(config)
    model.save_pretrained("base")  # Only rank 0 writes.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return getattr(transformers, kind).from_pretrained("base", dtype=torch.float32)


def _sft(args: dict[str, Any], options: dict[str, Any], callbacks: list[Any]) -> Any:
    from datasets import Dataset as Rows
    from trl import SFTConfig, SFTTrainer

    model = with_adapters(llama(), "q_proj") if options.get("adapters") else llama()
    samples = Samples(is_ragged=True)
    rows = Rows.from_dict({"input_ids": [samples[index]["input_ids"].tolist() for index in range(SAMPLES)]})
    config = SFTConfig(**args, max_length=LENGTH)
    return SFTTrainer(
        model, config, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer(), callbacks=callbacks
    )


PREFERENCES = {
    "dpo": ("trl.DPOTrainer", {}),
    "dpo_sync": ("trl.DPOTrainer", {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}),
    "kto": ("trl.KTOTrainer", {}),
    "reward": ("trl.RewardTrainer", {}),
    "orpo": ("trl.experimental.orpo.ORPOTrainer", {}),
    "cpo": ("trl.experimental.cpo.CPOTrainer", {}),
    "tpo": ("trl.experimental.tpo.TPOTrainer", {}),
}
"""TRL's trainers that read preferences: the class, and options of its configuration."""


def _of_preferences(kind: str, args: dict[str, Any], callbacks: list[Any]) -> Any:
    import importlib

    from datasets import Dataset as Rows

    path, more = PREFERENCES[kind]
    package, _, name = path.rpartition(".")
    module = importlib.import_module(package)
    words = random.Random(5)

    def text() -> str:
        return " " + " ".join(f"w{words.randrange(3, TOKENS)}" for _ in range(4))

    columns = ["prompt", "completion"] if kind == "kto" else ["prompt", "chosen", "rejected", "reference"]
    rows = [{column: text() for column in columns[: None if kind == "tpo" else 3]} for _ in range(SAMPLES)]
    rows = [{**row, "label": number % 2 == 0} if kind == "kto" else row for number, row in enumerate(rows)]
    config = getattr(module, name.replace("Trainer", "Config"))(**args, **more, max_length=2 * LENGTH)
    model = llama("LlamaForSequenceClassification" if kind == "reward" else "LlamaForCausalLM")
    return getattr(module, name)(
        model, args=config, train_dataset=Rows.from_list(rows), processing_class=tokenizer(), callbacks=callbacks
    )


def divide_on_cpu(strategy: str) -> None:
    """Make accelerate use FSDP2 or DeepSpeed on the CPU. Without this, accelerate silently uses DDP on the CPU.

    Args:
        strategy: `fsdp` or `zero`. Any other value changes nothing.
    """
    if strategy not in ("fsdp", "zero"):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def set_device(state: Any) -> None:
        state.device = torch.device("cpu")

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = set_device
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true" if strategy == "zero" else "false"


def _digests(*models: Any) -> list[dict[str, str]]:
    """Return the digest of each tensor of the given models."""
    from everstep.training.determinism.digests import digest_of

    return [{name: digest_of(each) for name, each in model.state_dict().items()} for model in models if model]


def use_fp16(accelerator: Any, scale: float) -> None:
    """Train with fp16 and torch's gradient scaler on the CPU, which accelerate refuses by its own check.

    Args:
        accelerator: the accelerator, which has prepared nothing yet.
        scale: the first scale, which doubles after two steps without overflow.
    """
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def rehearse(directory: str, arguments: dict[str, Any]) -> int:
    """Train as `run`, as a rank whose rehearsals restart it."""
    return replayed.run(lambda: run(directory, arguments) and None, Path(directory))


def run(directory: str, arguments: dict[str, Any]) -> int:
    """Train, and write the losses, a digest of each tensor of the state, and the next random draws."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "MASTER_ADDR": "127.0.0.1"}
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    import transformers.trainer

    import everstep.integrations.transformers as integration
    from tests.integration.training.scripts import digest

    # The log history is part of the state, so it must contain no durations.
    transformers.trainer.speed_metrics = lambda *_, **__: {}
    torch.use_deterministic_algorithms(True)
    os.chdir(arguments.get("home", directory))
    options = arguments.get("options", {})
    chosen = options.get("arguments", {})
    strategy = "zero" if "deepspeed" in chosen else "fsdp" if "fsdp" in chosen else "ddp"
    divide_on_cpu(strategy)
    torch.manual_seed(0)
    args = {
        "output_dir": "output",
        "max_steps": arguments["until"],
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": options.get("accumulate", 1),
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 4,
        "logging_steps": options.get("logging", 3),
        "eval_strategy": "steps" if options.get("evaluates") else "no",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": strategy == "ddp",
        "bf16": options.get("bf16", False),
        "dataloader_num_workers": options.get("workers", 0),
        **options.get("arguments", {}),
    }
    begun: list[int] = []
    events: list[list[Any]] = []

    class Progress(transformers.TrainerCallback):  # type: ignore[misc]
        """Records the first step and the gradient scales.

        Calls `reach` after each step, so that the test can make this rank wait between two steps.
        """

        def on_train_begin(self, _: object, state: Any, *__: object, **___: object) -> None:
            begun.append(state.global_step)

        def on_step_end(self, _: object, state: Any, *__: object, **___: object) -> None:
            if (scaler := trainer.accelerator.scaler) is not None:
                events.append([state.global_step, scaler.get_scale(), trainer.accelerator.optimizer_step_was_skipped])
            reach(rank, state.global_step, arguments.get("points", {}))

    class Average(transformers.TrainerCallback):  # type: ignore[misc]
        """Averages the weights without `state_dict`, through `Tensor.data`, as many scripts do."""

        def __init__(self) -> None:
            self.updates = 0
            self.updated_at = 0.0

        def on_train_begin(self, *_: object, model: Any, **__: object) -> None:
            self.average = copy.deepcopy(model)

        def on_step_end(self, *_: object, model: Any, **__: object) -> None:
            self.updates += 1
            self.updated_at = time.time() if options.get("clock") else 0.0
            if self.updates % 3 == 0:
                for mean, each in zip(self.average.parameters(), model.parameters(), strict=True):
                    mean.data.mul_(0.5).add_(each.data, alpha=0.5)

    class Allocate(transformers.TrainerCallback):  # type: ignore[misc]
        """Lets AdaLoRA choose its ranks, as its documentation says."""

        def on_optimizer_step(self, _: object, state: Any, *__: object, model: Any, **___: object) -> None:
            if hasattr(getattr(model, "base_model", None), "update_and_allocate"):
                model.base_model.update_and_allocate(state.global_step)

    averages = [Average()] if options.get("averages") else []
    patience = [transformers.EarlyStoppingCallback(options["patience"])] if "patience" in options else []
    trainer = make_trainer(
        options.get("trainer", "gpt2"), args, options, [*averages, *patience, Allocate(), Progress()]
    )
    assert trainer.is_deepspeed_enabled == (strategy == "zero")
    assert trainer.is_fsdp_enabled == (strategy == "fsdp")
    if options.get("fp16"):
        # The scale begins so high that a gradient of the first step overflows, and gradients of later steps do, too.
        use_fp16(trainer.accelerator, 2.0**20)
    integration.attach(trainer)
    random.seed(300 + rank)
    np.random.seed(200 + rank)
    trainer.train()
    session = integration.session_of(trainer)
    result = {
        "rank": rank,
        "strategy": trainer.accelerator.distributed_type.value,
        "begun": begun[0],
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "best": [trainer.state.best_global_step, trainer.state.best_metric, trainer.state.best_model_checkpoint],
        "history": trainer.state.log_history,
        "events": events,
        "digest": digest(session),
        "second": _digests(getattr(trainer, "ref_model", None)),
        "averages": _digests(
            *(each.average for each in trainer.callback_handler.callbacks if hasattr(each, "average"))
        ),
        "draws": [torch.rand(()).item().hex(), float(np.random.rand()).hex(), random.random().hex()],
    }
    Path(directory, f"result-{rank}.json").write_text(json.dumps(result))
    if world > 1:
        dist.destroy_process_group()
    return 0
