"""How text is split into words before byte pairs are merged, as each family was released.

A pattern finds the words, one match each.
"""

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Each digit on its own before the GPT-2 pattern: to the rest of the text a digit is then an end.
DIGITS_THEN_GPT2 = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{LETTERS}|\p{{N}}{{1,3}}|{MARKS}|{SPACES}"
QWEN = rf"{LETTERS}|\p{{N}}|{MARKS}|{SPACES}"

LEAD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
