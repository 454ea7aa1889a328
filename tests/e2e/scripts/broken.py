"""Ends before its first step, with the reason on its last line."""

import sys

sys.exit("the tokenizer /data/vocabulary.json is missing")
