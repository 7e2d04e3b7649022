"""Tokenises text, much as the corpus of GloVe 6B was tokenised.

The text is lower-cased and normalised (NFC; curly apostrophes become straight). From left to right,
the first of these patterns that matches gives the next token:

| token | examples |
|---|---|
| a web address becomes `<url>` | `https://a.b/c`, `www.a.b` |
| a mail address becomes `<email>` | `me@a.org` |
| a mention becomes `<user>` | `@me` |
| the end of a contraction | `n't`, `'s`, `'re`, `'ve`, `'ll`, `'d`, `'m`: "don't" is `do n't` |
| initials with their dots | `u.s.`, `e.g.` |
| a number with its inner marks | `1,000.5`, `10:30`, `24/7` |
| a run of letters and digits with their marks | `mp3`, `2nd`, `café`, `हिन्दी` |
| two or more dots, two or more dashes | `...`, `--`, however many there were |
| any other mark; a repeated mark gives one token | `!` for `!!!`, `-`, `$` |

A zero-width joiner within a word is part of the token. Other invisible characters (control
characters, other joiners, variation selectors) are skipped, so a composed emoji gives several
tokens. Words of a language written without spaces are not separated.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import chain

URL, EMAIL, USER = "<url>", "<email>", "<user>"

_SPECIAL = {"url": URL, "email": EMAIL, "user": USER, "dots": "...", "dashes": "--"}
_NEGATION = re.compile(r"(?<=[^\W_])(?=n't(?![^\W_]))")
_STRAIGHT = str.maketrans({"\u2019": "'", "\u02bc": "'", "`": "'"})

# Possessive quantifiers (`++`) prevent catastrophic backtracking. MARKS is replaced by the
# combining marks, for which `re` has no class.
_TOKEN = r"""
      (?P<url> https?://\S++ | www\.[^\W_]\S*+ )
    | (?P<email> [\w.+-]{1,64}+@[\w-]{1,63}+(?:\.[\w-]{1,63}+)++ )
    | (?P<user> @\w++(?:[MARKS]++\w*+)*+ )
    | (?P<word>
          (?: (?<=\ )n't | (?:(?<=[^\W_])|(?<=[MARKS]))'(?:s|re|ve|ll|d|m) )(?![^\W_]|[MARKS])
        | (?<![^\W_])(?<![MARKS])(?:[^\W\d_]\.){2,}+
        | \d++(?:[.,:/]\d++)*+(?![^\W_]|[MARKS])
        | [^\W_]++(?:(?:[MARKS]|[\u200c\u200d](?=[^\W_]))++[^\W_]*+)*+
      )
    | (?P<dots> \.{2,}+ )
    | (?P<dashes> -{2,}+ )
    | (?P<mark> [^\w\s\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060\ufe00-\ufe0f\ufeff]|_)
      (?P=mark)*+
"""


@cache
def _token(ascii_only: bool) -> re.Pattern[str]:
    """Return the pattern of a token; ASCII text has a faster pattern, without combining marks."""
    marks = r"\u0300" if ascii_only else _marks()
    return re.compile(_TOKEN.replace("MARKS", marks), re.VERBOSE)


def _marks() -> str:
    """Return the combining marks of Unicode, as ranges of a character class of `re`."""
    # Without variation selectors, FE00 to FE0F, and tags, above 1F000, which are invisible.
    places = chain(range(0x300, 0xFE00), range(0xFE10, 0x1F000))
    found = [i for i in places if unicodedata.category(chr(i)) in ("Mn", "Mc", "Me")]
    first = [i for i, before in zip(found, [0, *found], strict=False) if i != before + 1]
    last = [i for i, after in zip(found, [*found[1:], 0], strict=True) if i != after - 1]
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(first, last, strict=True))


def tokenize(text: str) -> list[str]:
    """Return the tokens of a text.

    >>> tokenize("I don't know: see http://a.org, @me... It's 10:30!!!")
    ['i', 'do', "n't", 'know', ':', 'see', '<url>', '<user>', '...', 'it', "'s", '10:30', '!']
    """
    text = text.lower()
    ascii_only = text.isascii()
    if not ascii_only:
        text = unicodedata.normalize("NFC", text)
    text = text.translate(_STRAIGHT)
    if "n't" in text:
        text = _NEGATION.sub(" ", text)
    tokens = []
    for match in _token(ascii_only).finditer(text):
        kind = match.lastgroup
        assert kind is not None
        tokens.append(_SPECIAL.get(kind) or match[kind])
    return tokens
