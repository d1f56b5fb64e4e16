"""Reading a data file: 100,000 rows as verl's examples write them, with a chat template and a limit
of 512 tokens."""

import os
import random
import tempfile
from pathlib import Path

import numpy as np

from megagrpo.config.data import DataConfig
from megagrpo.data.prompts import load_prompts
from peers_kit.measure import OURS, Call, Cases
from peers_kit.work import SCALE, scaled

CASES = Cases()
NUM_ROWS = scaled(100_000)
ITEM = f"reading {NUM_ROWS:,} rows"
MOST_TOKENS, WORDS = 512, 8000
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


def folder() -> Path:
    """The folder of data and tokenizer, which the first call makes."""
    made = Path(os.environ["PEERS_FOLDER"]) / f"rows_{SCALE}"
    if not (made / "tokenizer").exists():
        _make(made)
    return made


def _make(made: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made.mkdir(parents=True, exist_ok=True)
    chance = random.Random(6)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(WORDS)]
    rows = []
    for i in range(NUM_ROWS):
        length = min(int(chance.lognormvariate(4.0, 0.6)), 2000)
        text = " ".join(chance.choices(words, k=length)) + f" What is {i} + 1?"
        rows.append(
            {
                "data_source": "numbers",
                "prompt": [{"role": "user", "content": text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
                "extra_info": {"split": "train", "index": i},
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), made / "data.parquet")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["prompt"][0]["content"] for row in rows[:5000]), trainer)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    whole.chat_template = TEMPLATE
    whole.save_pretrained(made / "tokenizer")


def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder() / "tokenizer")


@CASES.add(ITEM, OURS)
def _ours() -> Call:
    tokenizer = _tokenizer()
    data = DataConfig.model_validate(
        {
            "path": str(folder() / "data.parquet"),
            "prompt_key": "prompt",
            "chat_template": True,
            "answer_key": "reward_model.ground_truth",
            "max_prompt_tokens": MOST_TOKENS,
        }
    )

    def call():
        prompts = load_prompts(data, tokenizer)
        return np.array([len(prompts)]), {"kept": len(prompts)}

    return call


@CASES.add(ITEM, "verl")
def _verl() -> Call:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    cache = tempfile.mkdtemp()
    os.environ["HF_DATASETS_CACHE"] = cache
    tokenizer = _tokenizer()
    config = OmegaConf.create(
        {
            "cache_dir": cache,
            "prompt_key": "prompt",
            "max_prompt_length": MOST_TOKENS,
            "truncation": "error",
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": None,
            "return_raw_chat": True,
        }
    )

    def call():
        rows = RLHFDataset(str(folder() / "data.parquet"), tokenizer, config)
        return np.array([len(rows)]), {"kept": len(rows), "tokenizes again": "in each step"}

    return call
