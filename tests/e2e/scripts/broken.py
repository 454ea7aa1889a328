"""A training script that fails before its first step and prints the reason on its last line."""

import sys

sys.exit("the tokenizer /data/vocabulary.json is missing")
